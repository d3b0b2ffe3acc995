"""Named trees, one JSON file each."""
