"""The operator medusa::CompactAppendKV: compact the accepted rows and append the tree rows."""
