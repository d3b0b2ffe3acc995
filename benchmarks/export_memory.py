"""Peak memory of an export for TensorRT: a Llama of 1.1 billion random fp16 weights, against 1.5 times these + 2 GB.

The checkpoint is written shard by shard into a temporary folder and goes again (with the bundle it takes twice the
weights on disk). The export runs in a process of its own, whose largest resident memory, mapped files included, is
read when it ends (VmHWM). Exit status 0 either way, unless the export fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from medusa_engine.benchmarks.measure import Report, Samples, ratio_of

GB = 1e9
SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
}
EXPORT = """
import sys
from pathlib import Path
from medusa_engine.exporter.cli import main
status = main(sys.argv[1:])
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print("peak kB:", peak.split()[1])
sys.exit(status)
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"], help="default: %(default)s")
    parser.add_argument("--precision", choices=("fp16", "bf16"), default="fp16", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="make the temporary folder here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and the figures")
    return parser


def main() -> int:
    options = build_parser().parse_args()
    sizes = SIZES | {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = Path(folder) / "model"
        source_bytes = write_llama(model, sizes)
        tree = Path(folder) / "tree.json"
        tree.write_text("[[0], [1], [0, 0]]")
        arguments = ["--model", model, "--untrained-heads", "4", "--tree", tree, "-o", Path(folder) / "bundle"]
        arguments += ["--target", "tensorrt", "--precision", options.precision]
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", EXPORT, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
        seconds = time.perf_counter() - started
        if done.returncode != 0:
            return done.returncode
        peak = 1024 * int(done.stdout.split("peak kB:")[1])
        weights = (Path(folder) / "bundle" / "weights.bin").stat().st_size
    report = Report()
    measured = Samples("largest resident memory of the export", "GB", (peak / GB,))
    bound = Samples("1.5 x the source's weights + 2 GB", "GB", ((1.5 * source_bytes + 2 * GB) / GB,))
    report.section(f"memory of an export, {options.precision}", [bound, measured])
    report.bar(ratio_of("memory over the bound", measured, bound), 1.0)
    facts = {"source_bytes": source_bytes, "weights_bytes": weights, "peak_bytes": peak, "seconds": seconds}
    print(f"  source {source_bytes / GB:.2f} GB, weights.bin {weights / GB:.2f} GB, {seconds:.0f} s")
    if options.json:
        report.save(options.json, sizes=sizes, precision=options.precision, **facts)
    return 0


def write_llama(folder: Path, sizes: dict[str, int]) -> int:
    """Write config, index and one shard of random weights per layer; returns the bytes of the weights."""
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 2048}
    config |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    key_rows = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_rows, hidden),
        "self_attn.v_proj": (key_rows, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shards: list[dict[str, tuple[int, ...]]] = [
        {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        for number in range(sizes["num_hidden_layers"])
    ]
    ends = {"model.embed_tokens.weight": (sizes["vocab_size"], hidden), "lm_head.weight": (sizes["vocab_size"], hidden)}
    shards.append({**ends, "model.norm.weight": (hidden,)})
    generator = np.random.default_rng(0)
    weight_map, total = {}, 0
    for number, shapes in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {name: random_weight(generator, shape) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def random_weight(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform of standard deviation 0.02, and norms of 1."""
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float16)
    return ((generator.random(shape, dtype=np.float32) - 0.5) * (0.02 * 12**0.5)).astype(np.float16)


if __name__ == "__main__":
    sys.exit(main())
