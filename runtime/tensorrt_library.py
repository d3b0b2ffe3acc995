"""TensorRT's Python module, chosen by the plan's sidecar, and a deserialised plan whose every call is checked."""

from __future__ import annotations

import importlib
import logging
import mmap
from pathlib import Path
from typing import Any

from medusa_engine.runtime.cuda import Stream
from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.plan import TENSORRT, TENSORRT_RTX, Plan, Tensor, build_command
from medusa_engine.runtime.plan_fit import check_library

_DTYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int64": "INT64",
    "int32": "INT32",
    "bool": "BOOL",
}
_SHOWN_CHARACTERS = 300  # of an error of the library

_log = logging.getLogger(__name__)


class TensorRtLibrary:
    """The module that runs a plan.

    Args:
        path: of the plan.
        plan: its sidecar.

    Raises:
        UserError: the module is not installed, or is another version than the one that built the plan.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        names = ["tensorrt_rtx"] if plan.flavor == TENSORRT_RTX else ["tensorrt"]
        if plan.flavor == TENSORRT and plan.version_compatible:
            names.append("tensorrt_lean")  # deserialises and runs, builds nothing
        self._path, self._plan = path, plan
        self.module = _import_first(names, path, plan)
        check_library(path, plan, module=self.module.__name__, version=self.module.__version__)

    def deserialize(self) -> PlanEngine:
        """The plan on the current device.

        Raises:
            UserError: the library refuses it, or its inputs and outputs are not those of the sidecar.
        """
        logger = _logger(self.module)
        runtime = self.module.Runtime(logger)
        if self._plan.version_compatible:
            runtime.engine_host_code_allowed = True  # the plan carries the runtime of the version that built it
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise UserError(
                f"{self._path}: {self.module.__name__} {self.module.__version__} does not take it as a plan:"
                f" {logger.reason()}",
                f"build the plan again: {build_command(self._path, self._plan)}",
            )
        result = PlanEngine(self._path, self.module, runtime, engine, logger)
        there = {tensor.name: tensor for tensor in result.tensors()}
        named = {tensor.name: tensor for tensor in self._plan.io}
        if there != named:
            name = min(name for name in there.keys() | named.keys() if there.get(name) != named.get(name))
            raise UserError(
                f"{self._path}: input or output {name} of the plan is not what the sidecar says of it",
                f"build the plan again: {build_command(self._path, self._plan)}",
            )
        return result


class PlanEngine:
    """A deserialised plan; several threads may make contexts of it."""

    def __init__(self, path: Path, module: Any, runtime: Any, engine: Any, logger: Any) -> None:
        self._path, self._module, self._runtime, self._engine, self._logger = path, module, runtime, engine, logger

    @property
    def scratch_bytes(self) -> int:
        """Device memory that the passes of one context work in; contexts that never run together may share it."""
        return int(self._engine.device_memory_size_v2)

    def tensors(self) -> list[Tensor]:
        """Inputs and outputs, as in a sidecar."""
        engine, module, found = self._engine, self._module, []
        dtypes = {getattr(module.DataType, name): dtype for dtype, name in _DTYPES.items()}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            mode = "input" if engine.get_tensor_mode(name) == module.TensorIOMode.INPUT else "output"
            dtype = engine.get_tensor_dtype(name)
            shape = tuple(int(size) for size in engine.get_tensor_shape(name))
            found.append(Tensor(name, mode, dtypes.get(dtype, str(dtype)), shape))
        return found

    def context(self, profile: int, scratch: int, stream: Stream, *, fixed_shapes: bool) -> PlanContext:
        """A context of one optimization profile, in scratch memory of `scratch_bytes`.

        Args:
            fixed_shapes: its inputs keep their shapes, so that kernels of exactly these are worth compiling at once.

        Raises:
            UserError: the library makes none.
        """
        strategy = self._module.ExecutionContextAllocationStrategy.USER_MANAGED
        specialization = getattr(self._module, "DynamicShapesKernelSpecializationStrategy", None)
        if specialization is None:
            made = self._engine.create_execution_context(strategy)
        else:  # TensorRT-RTX compiles kernels on this machine
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            if fixed_shapes:
                config.dynamic_shapes_kernel_specialization_strategy = specialization.EAGER
            made = self._engine.create_execution_context(config)
        context = PlanContext(self._path, made, self._logger)
        context.check("create_execution_context", made is not None)
        made.set_device_memory(scratch, self.scratch_bytes)
        context.check("set_optimization_profile_async", made.set_optimization_profile_async(profile, int(stream)))
        return context


class PlanContext:
    """An execution context: addresses and shapes of one kind of pass.

    Raises:
        UserError: in every method, the library refuses; with what it logged.
    """

    def __init__(self, path: Path, context: Any, logger: Any) -> None:
        self._path, self._context, self._logger = path, context, logger

    def bind(self, name: str, address: int) -> None:
        self.check(f"set_tensor_address({name})", self._context.set_tensor_address(name, address))

    def shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Give the shape of an input whose shape the profile leaves open."""
        self.check(f"set_input_shape({name}, {shape})", self._context.set_input_shape(name, shape))

    def enqueue(self, stream: Stream) -> None:
        """Put one pass into the stream."""
        self.check("execute_async_v3", self._context.execute_async_v3(int(stream)))

    def check(self, call: str, done: bool) -> None:
        if not done:
            raise UserError(
                f"{self._path}: the plan does not run: {call}: {self._logger.reason()}",
                "start again; if it comes back, report it with this line and the sidecar",
            )


def _import_first(names: list[str], path: Path, plan: Plan) -> Any:
    failure = ""
    for name in names:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: its libraries do not load
            failure = failure or f"{name}: {error}"
    raise UserError(
        f"{path}: needs {plan.flavor} {plan.library_version}, which Python cannot import: {failure}",
        f"install it: pip install '.[{plan.flavor}]' in a clone of medusa-engine",
    )


def _logger(module: Any) -> Any:
    """A logger of the library that hands its messages to Python's, and keeps the errors for the `UserError`."""

    class Logger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self._errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            name = str(severity).rsplit(".", 1)[-1]
            if name.endswith("ERROR"):
                self._errors.append(" ".join(message.split()))
            _log.log(logging.DEBUG if name == "VERBOSE" else logging.INFO, "%s", message)

        def reason(self) -> str:
            """The first error since the last question: those behind it follow from it."""
            errors, self._errors = self._errors, []
            return errors[0][:_SHOWN_CHARACTERS] if errors else "it does not say why"

    return Logger()
