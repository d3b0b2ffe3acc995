"""Where training work runs and in which precision."""

from __future__ import annotations

from medusa_engine.runtime.errors import UserError

DTYPES = ("bfloat16", "float16", "float32")


def choose_device(wanted: str | None) -> str:
    """The device to use: what was asked for, else cuda where there is one, else cpu.

    Raises:
        UserError: torch does not know that device, or this machine lacks it.
    """
    import torch

    from medusa_engine.exporter.error_text import first_line

    name = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"--device {name}: cannot be used: {first_line(error)}", "give cpu, or cuda where a GPU is"
        ) from error
    return name


def choose_dtype(wanted: str | None, device: str) -> str:
    """The precision to use: what was asked for, else bfloat16 where the device computes in it, else float32."""
    import torch

    if wanted is not None:
        return wanted
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    abilities = torch.cpu.get_capabilities()
    return "bfloat16" if abilities.get("avx512_bf16") or abilities.get("amx_bf16") else "float32"
