"""The files of a bundle that is open, which other programs may replace or write to meanwhile."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from medusa_engine.runtime.bundle_files import verify_file
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.graph_file import check_external_data
from medusa_engine.runtime.manifest import WEIGHTS_NAME, Manifest

_HINT = "open the engine again; medusa-export --force replaces a bundle without harm to engines that are open"


class OpenBundle:
    """Checks each graph once more when it is loaded, and the weights before every pass.

    ONNX Runtime maps the weights: what somebody writes into their file is in the model, and what he cuts off ends the
    process. A bundle that is replaced as a whole leaves the mapped file as it is.

    Args:
        folder: a verified bundle.
        manifest: its manifest.
        hashes: compare sha256, not sizes alone.

    Raises:
        UserError: the weights cannot be opened.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, hashes: bool) -> None:
        self._folder = folder
        self._manifest = manifest
        self._hashes = hashes
        self._weights = folder / WEIGHTS_NAME
        try:
            self._descriptor = os.open(self._weights, os.O_RDONLY)  # of the file itself, whatever its name is given to
        except OSError as error:
            raise UserError(f"cannot read the file: {error.strerror or error}", _HINT, file=self._weights) from error
        weakref.finalize(self, os.close, self._descriptor)
        self._opened = os.fstat(self._descriptor)

    def path(self, graph: str) -> Path:
        return self._folder / self._manifest.graphs[graph]

    def graph(self, graph: str) -> Path:
        """The file of a graph that is to be loaded, with the weights beside it.

        Raises:
            UserError: one of them is not the bundle's any more, or the graph reads other files than the weights.
        """
        path = self.path(graph)
        verify_file(path, self._manifest.files[path.name], hashes=self._hashes)
        check_external_data(path, WEIGHTS_NAME)
        self.check_weights()
        try:
            same = os.path.samestat(self._opened, self._weights.stat())
        except OSError:
            same = False
        if not same:
            raise UserError("replaced since the bundle was opened", _HINT, file=self._weights)
        return path

    def check_weights(self) -> None:
        """Refuse to go on with weights that somebody wrote to since the bundle was opened.

        Raises:
            UserError: names the file.
        """
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise UserError("changed while the bundle was open", _HINT, file=self._weights)
