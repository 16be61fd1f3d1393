"""What replacing the normalizer did to a model: loss, next-token distributions and attention, before and after."""

import math
from itertools import pairwise

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lm.config.tree import Config
from lm.data.batches import Batch, long_starts
from lm.data.store import Store
from lm.evaluation.held_out import HeldOut, by_token, validation_sequences
from lm.evaluation.sequences import by_sequence
from lm.model.attention_stream import in_lockstep
from lm.model.cross_entropy import token_kl, token_nll
from lm.model.decoder import Decoder, is_normalizer
from lm.model.device import Device
from lm.schema import Plain
from lm.statistics.intervals import paired_difference, sampled

DRIFT_SEQUENCES = 4  # sequences of each length whose attention weights are compared


def swap_sequences(store: Store, config: Config) -> list[HeldOut]:
    """Held-out sequences of each of `eval.swap_lengths`: the validation sequences, and longer ones within documents.

    Lengths that no held-out document has are left out, and all beyond the first where positions are learned.
    """
    found = []
    for factor in config.eval.swap_lengths:
        length = int(factor * config.data.seq_len)
        if factor == 1:
            found.append(validation_sequences(store, config))
        elif not config.model.position.ends:
            starts = long_starts(store.val, length, config.eval.long_context.sequences)
            found += [HeldOut.take(store, starts, length)] if len(starts) else []
    return found


def evaluate_swap(old: Decoder, new: Decoder, held_out: list[HeldOut], where: Device) -> dict[str, Plain]:
    """Both models on identical tokens, without a change to RoPE. Collective.

    For each length: the mean loss before and after (nats per token) with the 95 % interval of its change over documents,
    KL(old || new) of the next-token distributions (nats), both by position, and the attention drift of each layer:
    half the L1 distance of the two models' weights, a mean over queries and heads. It is 0 for equal attention and
    at most 1 for weights that sum to one; layers above the first see what the layers below have changed.
    """
    lengths = []
    for sequences in held_out:

        def measure(batch: Batch) -> Tensor:
            with where.autocast():
                hidden = [model.hidden(batch).flatten(0, 1) for model in (old, new)]
            targets = batch.targets.flatten()
            heads = old.head.weight, new.head.weight
            losses = [token_nll(h, head, targets) for h, head in zip(hidden, heads, strict=True)]
            return torch.stack([*losses, token_kl(hidden[0], heads[0], hidden[1], heads[1])]).view(3, *batch.targets.shape)

        before, after, kl = by_token([old, new], sequences, where, measure, numbers=3).astype("f8")
        counts = sequences.counts
        documents = sequences.document_labels
        change = paired_difference(after.mean(1, where=counts), before.mean(1, where=counts), counts.sum(1), documents)
        lengths.append(
            {
                "length": sequences.length,
                "sequences": len(sequences.sequences),
                "documents": len(np.unique(documents)),
                "sequences_sha256": sequences.sha256,
                "loss_before": float(before.mean(where=counts)),
                "loss_after": float(after.mean(where=counts)),
                "change": vars(change) | {"over": f"{sampled(documents)}, 1 checkpoint"},
                "kl": float(kl.mean(where=counts)),
                "attention_drift": attention_drift(old, new, sequences, where),
                "nll_by_position_before": _rounded(before, counts),
                "nll_by_position_after": _rounded(after, counts),
                "kl_by_position": _rounded(kl, counts),
            }
        )
    parameters = {name: [round(x, 6) for x in p.flatten().tolist()] for name, p in new.named_parameters() if is_normalizer(name)}
    names = {key: model.config.normalizer.label() for key, model in (("from", old), ("to", new))}
    return {"kind": "swap", **names, "seq_len": old.seq_len, "parameters": parameters, "lengths": lengths}


def _rounded(values: np.ndarray, counts: np.ndarray) -> list[float]:
    """Means over sequences by position; NaN where no sequence has a prediction that counts."""
    sums, sequences = (values * counts).sum(0), counts.sum(0)
    return [round(float(x), 6) for x in np.divide(sums, sequences, out=np.full(len(sums), np.nan), where=sequences > 0)]


def attention_drift(old: Decoder, new: Decoder, held_out: HeldOut, where: Device) -> list[float]:
    """Half the L1 distance between both models' attention weights, a mean over queries and heads, for each layer.

    On the first `DRIFT_SEQUENCES` sequences. Collective.
    """
    layers, sequences = old.config.n_layer, min(DRIFT_SEQUENCES, len(held_out.sequences))

    def measure(part: list[int]) -> Tensor:
        drift = torch.zeros(len(part), layers, dtype=torch.float64)
        for place, sequence in enumerate(part):  # one at a time: attention weights are large
            with where.autocast():
                for a, b in in_lockstep([old, new], held_out.batch([sequence]).to(where.device)):
                    apart = (a.weights - b.weights).abs().sum((0, 2, 3), dtype=torch.float64).mean()
                    drift[place, a.layer] += float(apart) / 2 / held_out.length
        return drift.float()

    drift = by_sequence([old, new], [held_out.length] * sequences, (layers,), where, measure)
    return [round(float(x), 6) for x in drift.mean(0, dtype=np.float64)]


def print_swap(result: dict[str, Plain]) -> None:
    """Tables on the terminal: for each length loss and KL by octave of position, then drift by layer."""
    console = Console()
    console.print(f"{result['from']} -> {result['to']}, step {result['step']}, losses and KL in nats per token", highlight=False)
    if not result["lengths"]:
        console.print("nothing measured: eval.swap_lengths names no length that a held-out document has", highlight=False)
    for one in result["lengths"]:
        change, times = one["change"], f"{one['length'] / result['seq_len']:g}x"
        interval = f"{change['mean']:+.4f} [{change['low']:+.4f}, {change['high']:+.4f}]"
        grid = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0))
        for column in (f"{times}: {one['sequences']} sequences", "loss before", "after", f"change [95% over\n{change['over']}]", "KL"):
            grid.add_column(column, justify="right", no_wrap=True)
        grid.add_row(f"0-{one['length']:,}", f"{one['loss_before']:.4f}", f"{one['loss_after']:.4f}", interval, f"{one['kl']:.5f}")
        octaves = [result["seq_len"] * 2.0**power for power in range(-3, math.ceil(math.log2(one["length"] / result["seq_len"])))]
        inner = [int(edge) for edge in octaves if edge.is_integer() and edge < one["length"]]
        for low, high in pairwise([0, *inner, one["length"]]):
            means = [
                sum(one[key][low:high]) / (high - low) for key in ("nll_by_position_before", "nll_by_position_after", "kl_by_position")
            ]
            grid.add_row(f"{low:,}-{high:,}", f"{means[0]:.4f}", f"{means[1]:.4f}", f"{means[1] - means[0]:+.4f}", f"{means[2]:.5f}")
        console.print(grid)
        console.print(f"attention drift by layer: {' '.join(f'{x:.4f}' for x in one['attention_drift'])}", highlight=False, soft_wrap=True)
