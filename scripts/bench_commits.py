"""Time a training step of two commits, interleaved; each commit runs in its own process from its own checkout.

python scripts/bench_commits.py OLD [NEW]                    1.2 M parameters, softmax, one thread; NEW: HEAD
python scripts/bench_commits.py OLD --recipe modern          the recipe of configs/recipes/modern.yaml
python scripts/bench_commits.py OLD --nanogpt PATH/model.py  GPT-2's choices, nanoGPT beside them
python scripts/bench_commits.py OLD --llama                  transformers' Llama of equal shape beside them
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import print_ratios

ROOT = Path(__file__).resolve().parent.parent
MODEL_SHAPES = {  # layers, heads, width, sequences of 256 tokens, vocabulary
    "1.2M": (4, 3, 96, 8, 4096),
    "13.9M": (6, 6, 384, 12, 8192),
}
SEQ_LEN = 256

WORKER_SCRIPT = """
import importlib.util, json, sys, time
import torch
timed_model = json.loads(sys.argv[1])
layers, heads, width, sequences, vocabulary = timed_model["shape"]
torch.set_num_threads(timed_model["threads"])
torch.manual_seed(0)
given = torch.randint(vocabulary, (sequences, 257))
try:
    from lm.machine import keep_freed_memory
    keep_freed_memory()  # as `lm train` does, from 0.11.0 on
except ImportError:
    pass
if timed_model.get("llama"):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    sizes = dict(num_hidden_layers=layers, num_attention_heads=heads, hidden_size=width,
            intermediate_size=-(-8 * width // 192) * 64)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=256,
            attn_implementation="sdpa", **sizes))
    class Timed(TrainerCallback):
        # A step for each line; the first three are not asked for.
        def on_step_begin(self, arguments, state, control, **_):
            if state.global_step == 3:
                print("ready", flush=True)
            if state.global_step >= 3 and not sys.stdin.readline():
                raise SystemExit
            self.started = time.perf_counter()
        def on_step_end(self, arguments, state, control, **_):
            if state.global_step > 3:
                print(time.perf_counter() - self.started, flush=True)
    rows = [{"input_ids": row[:-1], "labels": row[:-1]} for row in given] * 10000
    arguments = TrainingArguments(
        output_dir="trainer", use_cpu=True, bf16=True, max_steps=10000, per_device_train_batch_size=sequences,
        optim="adamw_torch_fused",
        learning_rate=1e-4, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=rows, callbacks=[Timed()]).train()
if timed_model.get("nanogpt"):
    found = importlib.util.spec_from_file_location("nanogpt_model", timed_model["nanogpt"])
    sys.modules["nanogpt_model"] = module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    sizes = dict(n_layer=layers, n_head=heads, n_embd=width, block_size=256, vocab_size=vocabulary)
    model = module.GPT(module.GPTConfig(**sizes, dropout=0.0, bias=True))
    forward = torch.compile(model) if timed_model["compile"] else model
    inputs, targets = given[:, :-1].contiguous(), given[:, 1:].contiguous()
    loss, optimizer = lambda: forward(inputs, targets)[1], torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
else:
    try:
        from lm.config import normalizers as kinds
    except ImportError:
        from lm.attention import catalogue as kinds  # of 0.11
    from lm.config import model_config
    from lm.config.model_config import ModelConfig
    from lm.config.training_config import OPTIMIZERS, OptimConfig
    from lm.data.batches import Batch
    from lm.model.decoder import Decoder
    from lm.training.optimizers import make_optimizer
    learned = getattr(model_config, "LearnedPosition", None) or model_config.Learned  # of earlier commits
    recipes = {
        "plain": {},
        "gpt2": dict(mlp="gelu", norm="layer", position=learned(), bias=True, tied=True),
        "modern": dict(mlp="relu2", qk_norm=True, out_init="zero", embedding_norm="rms", value_residual="first_layer",
        logit_softcap=15),
    }
    options = getattr(kinds, "LAYER_OPTIONS", None) or kinds.SINGLE  # of earlier commits
    normalizer = options[timed_model["normalizer"]]()
    config = ModelConfig(n_layer=layers, n_head=heads, n_embd=width, normalizer=normalizer,
        **recipes[timed_model["recipe"]])
    model = Decoder(config, vocabulary, 256)
    optimizer = make_optimizer(model,
        OptimConfig(optimizer=OPTIMIZERS["muon" if timed_model["recipe"] == "modern" else "adamw"]()))
    make_batch = getattr(Batch, "from_sequences", None) or Batch.of  # of earlier commits
    summed_loss = getattr(model, "summed_loss", None) or model.loss  # of earlier commits
    loss = lambda: summed_loss(make_batch(given)) / given[:, 1:].numel()

def step():
    with torch.autocast("cpu", torch.bfloat16):
        value = loss()
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

for _ in range(3):
    step()
print("ready", flush=True)
for _ in sys.stdin:
    started = time.perf_counter()
    step()
    print(time.perf_counter() - started, flush=True)
"""


def extract_commit(commit: str, folder: Path) -> Path:
    """Write the package lm as it was at a commit to a new folder below `folder`, and return the new folder."""
    place = folder / commit
    place.mkdir()
    archive = subprocess.run(["git", "archive", commit, "lm"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
    return place


def start_worker(timed_model: dict[str, object], package_folder: Path) -> subprocess.Popen[str]:
    """Start a process that makes one training step for each line of its input, and prints the step's seconds.

    Args:
        timed_model: what the process times, as `WORKER_SCRIPT` reads it: shape, threads, recipe and normalizer.
        package_folder: folder with the commit's package.
    """
    command = [sys.executable, "-c", WORKER_SCRIPT, json.dumps(timed_model)]
    environment = {**os.environ, "PYTHONPATH": str(package_folder)}
    process = subprocess.Popen(
        command, cwd=package_folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line == "ready\n":
            return process
    raise SystemExit("a process could not be started: its message is above")


def main() -> None:
    """Time the commits, and print ratios of their step times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--shape", choices=MODEL_SHAPES, default="1.2M")
    parser.add_argument("--normalizer", default="softmax", help="of the new commit, beside softmax of both")
    parser.add_argument("--recipe", choices=["plain", "gpt2", "modern"], default="plain")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--nanogpt", type=Path, help="nanoGPT's model.py: as it is and compiled, beside the others")
    parser.add_argument(
        "--llama", action="store_true", help="transformers' Llama under its Trainer, eager, beside the others"
    )
    options = parser.parse_args()
    common = {
        "shape": MODEL_SHAPES[options.shape],
        "threads": options.threads,
        "recipe": options.recipe,
        "normalizer": "softmax",
    }
    with tempfile.TemporaryDirectory() as temporary:
        old, new = (extract_commit(commit, Path(temporary)) for commit in (options.old, options.new))
        alternatives = {options.old: (common, old), options.new: (common, new), f"{options.new} again": (common, new)}
        if options.normalizer != "softmax":
            alternatives[f"{options.new}, {options.normalizer}"] = {**common, "normalizer": options.normalizer}, new
        if options.nanogpt:
            nanogpt = {**common, "nanogpt": str(options.nanogpt.resolve())}
            alternatives |= {
                "nanoGPT": ({**nanogpt, "compile": False}, new),
                "nanoGPT compiled": ({**nanogpt, "compile": True}, new),
            }
        if options.llama:
            alternatives["transformers' Llama"] = {**common, "llama": True}, new
        processes = {name: start_worker(*timed_model) for name, timed_model in alternatives.items()}
        times: dict[str, list[float]] = {name: [] for name in processes}
        for _ in range(options.rounds):
            for name in random.sample(list(processes), len(processes)):
                processes[name].stdin.write("\n")
                processes[name].stdin.flush()
                times[name].append(float(processes[name].stdout.readline()))
        for process in processes.values():
            process.stdin.close()
    tokens = MODEL_SHAPES[options.shape][3] * SEQ_LEN
    for base_name in [
        options.old,
        f"{options.new} again",
        *(name for name in ("nanoGPT compiled", "transformers' Llama") if name in alternatives),
    ]:
        print_ratios(times, base_name, tokens)


if __name__ == "__main__":
    main()
