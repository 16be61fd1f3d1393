"""Models out: transformers loads them, with the code that they bring where it needs some, and computes the same; others
are refused.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import yaml
from conftest import ROOT, lm, mark_others_slow
from manifests import edit_json
from test_import import CASES, T, V, imported, save
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.dynamic_module_utils import get_imports

from lm.attention import catalogue as opt
from lm.attention.catalogue import OPTIONS_BY_NAME
from lm.attention.layout import AttentionLayout
from lm.config.data_config import TrainedTokenizer
from lm.config.model_config import GAUBlock, LearnedPosition, LinearScaling, ModelConfig, NoPosition, Rope
from lm.config.normalizers import LAYER_OPTIONS, LayerList
from lm.data.batches import Batch
from lm.data.tokenizer import train_tokenizer
from lm.errors import RunError
from lm.evaluation.generation import Sampling, generate
from lm.huggingface.exporting import QWEN2_WORD_PATTERN, add_start_token, export_for_transformers
from lm.model.decoder import Decoder
from lm.plugins import PLUGINS
from lm.runs.loading import load, save_model
from lm.training.train import train


def exported(source: Path, out: Path) -> Path:
    result = lm("export", str(source), "--format", "hf", "-o", str(out))
    assert (result.returncode, result.stdout) == (0, f"{out}\n"), result.stderr
    return out


def tokens() -> torch.Tensor:
    return torch.randint(V, (2, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_import_export_import_gives_the_same_bits_and_transformers_the_same_logits(case: str, tmp_path: Path):
    original = save(tmp_path / "hf", *CASES[case])
    first = imported(tmp_path / "hf", tmp_path / "first")
    model, report = AutoModelForCausalLM.from_pretrained(
        exported(tmp_path / "first", tmp_path / "again"), output_loading_info=True
    )
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(model.eval()(tokens()).logits, original(tokens()).logits, rtol=0, atol=1e-4)
    second = imported(tmp_path / "again", tmp_path / "second")
    assert second.spec == first.spec
    assert second.decoder.state_dict().keys() == first.decoder.state_dict().keys()
    assert all(
        torch.equal(value, second.decoder.state_dict()[name]) for name, value in first.decoder.state_dict().items()
    )


SHAPES = {
    "gpt2": ModelConfig(
        2, n_head=2, n_embd=32, mlp="relu2", norm="layer", position=LearnedPosition(), bias=True, tied=True
    ),
    "llama": ModelConfig(2, n_head=4, n_kv_head=2, n_embd=32, n_mlp=48),
    "qwen2": ModelConfig(
        2, n_head=2, n_embd=36, head_size=16, qkv_bias=True, normalizer=LayerList([opt.Softmax(), opt.Window(size=9)])
    ),
    "qwen3": ModelConfig(2, n_head=2, n_embd=36, head_size=16, qk_norm=True, norm_eps=1e-4, position=Rope(theta=500.0)),
}


@pytest.mark.parametrize("kind", SHAPES)
@torch.no_grad()
def test_models_made_here_are_computed_by_transformers(kind: str, tmp_path: Path):
    decoder = Decoder(SHAPES[kind], V, 64, seed=3)
    for parameter in decoder.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.1)
    save_model(decoder, tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(exported(tmp_path / "ours", tmp_path / "hf")).eval()
    assert model.config.model_type == kind
    torch.testing.assert_close(model(tokens()[:, :64]).logits, decoder.logits(tokens()[:, :64]), rtol=0, atol=1e-4)


def test_a_run_is_exported_with_its_tokenizer_and_a_card(tiny, tmp_path: Path):
    config = tiny("name=run", "model.normalizer=softmax", "eval.sequences=4")
    train(config)
    source, out = load(config.run_folder), exported(config.run_folder, tmp_path / "hf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out).eval(), AutoTokenizer.from_pretrained(out)
    text, start = "some words<|endoftext|>of text ", source.tokenizer_and_start_id()[1]
    assert tokenizer(text).input_ids == [start, *source.tokenizer.encode(text).ids]
    assert tokenizer(text, add_special_tokens=False).input_ids == source.tokenizer.encode(text).ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, model.config.bos_token_id) == (start, start, start)
    prompt = tokenizer("some words").input_ids
    continuation = model.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert list(generate(source.decoder, prompt, 8, Sampling(temperature=0))) == continuation[0, len(prompt) :].tolist()
    card = (out / "README.md").read_text()
    for phrase in (
        "library_name: transformers",
        "Documents start with `<|endoftext|>`, which",
        "Trained for ",
        "normalizer:",
    ):
        assert phrase in card, card


@pytest.mark.parametrize("end_tokens", [["</s>"], ["<end>", "</s>"], []])
@pytest.mark.parametrize("normalizer", ["softmax", "ssmax"])
def test_transformers_stops_at_the_tokens_that_end_documents(normalizer: str, end_tokens: list[str], tmp_path: Path):
    tokenizer = train_tokenizer(iter(["some words of text"] * 3), TrainedTokenizer(vocab_size=260))
    tokenizer.add_special_tokens(["</s>", "<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shape = replace(SHAPES["gpt2"], normalizer={"softmax": opt.Softmax, "ssmax": opt.SSMax}[normalizer]())
    ours = save_model(Decoder(shape, V, 64, seed=3), tmp_path / "ours", tmp_path / "tokenizer.json")
    edit_json(ours / "lm.json", lambda description: description["spec"].update(end_tokens=end_tokens))
    out = exported(ours, tmp_path / "hf")
    tokenizer_read = AutoTokenizer.from_pretrained(out)
    ids = [tokenizer.token_to_id(token) for token in end_tokens or ["<|endoftext|>"]]
    assert (tokenizer_read.eos_token_id, tokenizer_read.bos_token, tokenizer_read.pad_token) == (
        ids[0],
        "<|endoftext|>",
        "<|endoftext|>",
    )
    assert AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True).generation_config.eos_token_id == (
        ids if ids[1:] else ids[0]
    )
    if normalizer == "softmax":
        assert imported(out, tmp_path / "again").spec.end_tokens == end_tokens


@pytest.mark.parametrize(
    ("change", "is_plain"),
    [
        (lambda fields: fields["pre_tokenizer"]["pretokenizers"][1].update(trim_offsets=False), True),
        (lambda fields: fields["model"].update(ignore_merges=True), False),
        (
            lambda fields: fields["pre_tokenizer"]["pretokenizers"].insert(
                1, {"type": "Digits", "individual_digits": False}
            ),
            False,
        ),
    ],
)
def test_a_model_is_qwen_2_if_its_tokenizer_is_in_all_that_autotokenizer_would_replace(
    change: Callable, is_plain: bool, tmp_path: Path
):
    tokenizer = Tokenizer(
        models.BPE({token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    split = pre_tokenizers.Split(Regex(QWEN2_WORD_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([split, byte_level]), decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    fields = json.loads(tokenizer.to_str())
    change(fields)
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    save_model(Decoder(SHAPES["qwen2"], V, 64, seed=3), tmp_path / "ours", tmp_path / "tokenizer.json")
    out = exported(tmp_path / "ours", tmp_path / "hf")
    assert json.loads((out / "config.json").read_text())["model_type"] == ("qwen2" if is_plain else "lm_decoder")
    ids = AutoTokenizer.from_pretrained(out, trust_remote_code=True)("cafe\u0301 12<|endoftext|>!").input_ids
    assert ids[1:] == load(tmp_path / "ours").tokenizer.encode("cafe\u0301 12<|endoftext|>!").ids


@pytest.mark.parametrize("start", ["<|endoftext|>", "<|end of text|>", "[START:1]", "\n", "$A"])
def test_any_token_can_start_documents(start: str):
    tokenizer = train_tokenizer(iter(["some words of text"] * 3), TrainedTokenizer(vocab_size=260))
    tokenizer.add_special_tokens([start])
    changed = Tokenizer.from_str(add_start_token(tokenizer.to_str(), start))
    assert changed.encode("some words").ids == [tokenizer.token_to_id(start), *tokenizer.encode("some words").ids]


MODERN = yaml.safe_load((ROOT / "configs" / "recipes" / "modern.yaml").read_text())["model"]


def shape(normalizer: opt.Options, **changes: object) -> ModelConfig:
    """The recipe `modern`, small, with grouped queries, and with changes."""
    recipe = MODERN | {"position": Rope()} | changes
    return ModelConfig(n_layer=3, n_head=4, n_kv_head=2, n_embd=32, normalizer=normalizer, **recipe)


def gated(normalizer: opt.Options, **changes: object) -> ModelConfig:
    """Gated attention units."""
    return ModelConfig(4, n_head=1, n_embd=32, block=GAUBlock(key_size=16), normalizer=normalizer, **changes)


LISTED = LayerList([opt.Window(size=20), opt.SSMax(bias=True), opt.Window(size=5)])
PLAIN = {"embedding_norm": None, "value_residual": None, "logit_softcap": None, "qk_norm": False, "mlp": "swiglu"}
BY_OPTIONS = {  # each normalizer, with options that act within few tokens; and further formulas
    **{name: options() for name, options in OPTIONS_BY_NAME.items()},
    "yarn": opt.YaRN(n="visible", base=50.0),
    "llama4": opt.Llama4(floor_scale=16.0),
    "softcap": opt.SoftCap(cap=2.0),
    "window": LISTED,
    "sigmoid": LayerList([opt.Sigmoid(), opt.Sigmoid(bias=True)]),
    "linear": LayerList([opt.Linear(), opt.Linear(features="relu", decay=True)]),
    "softmax at a temperature": opt.Softmax(temperature=0.5),
    "ssmax with b": opt.SSMax(bias=True),
    "ssmax, n fixed": opt.SSMax(n="fixed:100"),
    "log_n, clipped": opt.LogN(clip=True, base=20.0),
    "cosine, log n": opt.Cosine(log_n=True),
    "relu2 of q.k / n": opt.Relu2(form="1/n^2", n="fixed:40"),
    "relu2 over its sum": opt.Relu2(n="sum"),
}
PARTS = {
    "layer norms, biases": shape(opt.SSMax(), norm="layer", bias=True, tied=True, mlp="gelu"),
    "p-RoPE, rescaled": shape(
        opt.SSMax(), **PLAIN | {"position": Rope(fraction=0.5, scaling=LinearScaling(factor=3.0))}
    ),
    "layers without positions": shape(opt.SSMax(), position=Rope(layers=[True, False])),
    "a gate for each element": shape(opt.LogN(), output_gate="element"),
    "two maps a head": shape(opt.SSMax(), differential=True),
    "two queries a head, own values left out": shape(
        opt.Relu2(), differential="v2", exclusive=True, output_gate="head", gate_inputs=12
    ),
    "learned positions": shape(opt.SSMax(), **PLAIN | {"position": LearnedPosition()}),
    "parallel, rotated in part": shape(opt.SSMax(), parallel=True, position=Rope(fraction=0.5, partial=True)),
    "norms of outputs": shape(opt.SSMax(), post_norm=True, qk_norm="width", value_residual=None),
    "gau": gated(LayerList([opt.Relu2(), opt.SSMax(), opt.Sink()])),
    "gau with window": gated(
        LayerList([opt.Window(size=20), opt.QASSMax()]), qk_norm=True, bias=True, embedding_norm="layer", tied=True
    ),
    "no positions": shape(opt.Softmax(), **PLAIN | {"position": NoPosition(), "qkv_bias": True, "mlp_bias": True}),
}
OWN_CODE = {name: shape(options) for name, options in BY_OPTIONS.items()} | PARTS
# by default a case for each formula that leaves by another way, and each part of a layer
DEFAULT = ("ssmax, n fixed", "llama4", "cosine, log n", "p_n", "qassmax", "sink", "relu2 over its sum", "sigmoid")


def moved(model: ModelConfig, length: int, folder: Path) -> tuple[Decoder, Path]:
    """A decoder whose parameters have been moved off their initial values, and its export."""
    decoder, generator = Decoder(model, V, length, seed=3).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in dict.fromkeys(decoder.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    save_model(decoder, folder / "ours")
    return decoder, exported(folder / "ours", folder / "hf")


def of_transformers(folder: Path, kernel: str = "sdpa", **options: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, attn_implementation=kernel, **options
    ).eval()


@pytest.mark.parametrize("case", mark_others_slow(OWN_CODE, (*DEFAULT, *PARTS)))
@torch.no_grad()
def test_code_of_its_own_computes_our_logits_whole_packed_padded_and_cached(case: str, tmp_path: Path):
    decoder, folder = moved(OWN_CODE[case], 128, tmp_path)
    sample, padding = tokens()[:, :128], torch.ones(2, 128, dtype=torch.long)
    padding[0, :30] = 0
    positions = torch.cat((torch.arange(50), torch.arange(78))).expand(2, -1)
    logits, packed = decoder.logits(sample), decoder.head(decoder(sample, AttentionLayout.from_positions(positions)))
    unpadded = decoder.logits(sample[:1, 30:])[0]

    def near(result: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-4, msg=lambda text: f"{kernel}: {text}")

    for kernel in ("sdpa", "eager"):
        model = of_transformers(folder, kernel)
        assert model.config.model_type == "lm_decoder"
        near(model(sample).logits, logits)
        for mask in (None, torch.ones_like(sample), (positions == 0).cumsum(-1)):  # the last numbers documents
            near(model(sample, position_ids=positions, attention_mask=mask).logits, packed)
        visible = (positions == 0).cumsum(-1)[:, :, None] == (positions == 0).cumsum(-1)[:, None]
        own_mask = {"attention_mask": visible[:, None].tril()}
        near(model(sample, **own_mask).logits, packed)
        near(model(sample, attention_mask=padding).logits[0, 30:], unpadded)
        out = model(sample[:, :60], use_cache=True)
        parts = [out.logits]
        for part in sample[:, 60:].split([1, 7, 30, 1, 29], 1):
            out = model(part, past_key_values=out.past_key_values)
            parts.append(out.logits)
        near(torch.cat(parts, 1), logits)


@pytest.mark.parametrize("normalizer", [opt.SSMax(), LISTED, opt.Relu2()], ids=lambda options: options.name)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@torch.no_grad()
def test_packed_documents_beside_padding_stay_apart(kernel: str, normalizer: opt.Options, tmp_path: Path):
    decoder, folder = moved(shape(normalizer), 128, tmp_path)
    model, sample = of_transformers(folder, kernel), tokens()[:, :100]
    positions, numbers = torch.zeros(2, 100, dtype=torch.long), torch.zeros(2, 100, dtype=torch.long)
    documents = {(0, 10, 50): 1, (0, 50, 90): 2, (1, 0, 30): 1, (1, 30, 31): 2, (1, 31, 70): 3}  # row, begin, end
    for (row, begin, end), number in documents.items():
        positions[row, begin:end], numbers[row, begin:end] = torch.arange(end - begin), number
    for mask in (numbers, numbers != 0):
        logits = model(sample, attention_mask=mask, position_ids=positions).logits
        for row, begin, end in documents:
            expected = decoder.logits(sample[row : row + 1, begin:end])[0]
            torch.testing.assert_close(logits[row, begin:end], expected, rtol=0, atol=1e-4)
    arguments = {"attention_mask": numbers, "position_ids": positions}
    with pytest.raises(ValueError, match=r"packed documents .* have no cache: set use_cache to False"):
        model(sample, **arguments, use_cache=True)


@torch.no_grad()
def test_a_configuration_asks_for_weights_and_hidden_states(tmp_path: Path):
    _, folder = moved(shape(opt.SSMax()), 64, tmp_path)
    flags = {"output_attentions": True, "output_hidden_states": True}
    out = of_transformers(folder, "eager", **flags)(tokens()[:, :20])
    expected = of_transformers(folder, "eager")(tokens()[:, :20], **flags)
    assert [len(out.attentions), len(out.hidden_states)] == [3, 4]
    torch.testing.assert_close([*out.attentions, *out.hidden_states], [*expected.attentions, *expected.hidden_states])


PLUGIN = """
from dataclasses import dataclass
import torch
from lm.attention import layout as layouts
from lm.attention.normalizer import SoftmaxNormalizer, logits
from lm.attention.options import Options, key

@dataclass
class PowerOptions(Options):
    full_formula = "softmax(s z n^p)"
    p: float = key(0.1, "power of n")

class Power(SoftmaxNormalizer):
    schema = PowerOptions
    def initialise(self) -> None:
        self.s = self.new_parameter(1.0)
    def define_scores(self, q, k, layout: layouts.AttentionLayout):
        n = layout.n("visible").unsqueeze(-2).unsqueeze(-1).to(q.dtype)
        return logits(q, k) * self.s.view(-1, 1, 1) * n**self.options.p
"""
WITHOUT_LM_2048 = """
import sys
sys.modules["lm"] = None  # any import of it raises
import torch
from transformers import AutoModelForCausalLM
folder, file = sys.argv[1:]
case = torch.load(file)
sample, padding, positions = case["sample"], case["padding"], case["positions"]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    cached = model(sample[:, :2000], use_cache=True)
    last = model(sample[:, 2000:], past_key_values=cached.past_key_values).logits
    results = {
        "whole": model(sample).logits, "packed": model(sample, position_ids=positions).logits,
        "padded": model(sample, attention_mask=padding).logits[0, 600:], "cached": torch.cat((cached.logits, last), 1)
    }
for name, result in results.items():
    torch.testing.assert_close(result, case[name], rtol=0, atol=1e-4, msg=lambda text: f"{name}: {text}")
prompt, options = {"input_ids": sample[:, 400:640], "attention_mask": padding[:, 400:640]}, {"do_sample": False}
out = model.generate(**prompt, **options, max_new_tokens=8, eos_token_id=None)
static = {"cache_implementation": "static", "disable_compile": True}
assert out.equal(model.generate(**prompt, **options, **static, max_new_tokens=8, eos_token_id=None))
assert out[0, -8:].tolist() == case["continuation"]
"""


@pytest.mark.slow
@torch.no_grad()
def test_each_normalizer_computes_2048_tokens_where_lm_can_not_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A model with a layer for each normalizer of lm, and one for a plugin of one file."""
    (tmp_path / "powers.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    with PLUGINS.trust_user_text():
        plugin = LAYER_OPTIONS["powers:Power"](p=0.2)
    PLUGINS.allow(["powers"])
    recipe = MODERN | {"position": Rope()}
    own = [opt.YaRN(n="visible") if options is opt.YaRN else options() for options in OPTIONS_BY_NAME.values()]
    layers = LayerList([*own, plugin])
    model = ModelConfig(len(layers.of), n_head=2, n_kv_head=1, n_embd=16, normalizer=layers, **recipe)
    decoder = Decoder(model, V, 2048, seed=3).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in decoder.named_parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.1 if ".normalizer." in name else 0.02))
    save_model(decoder, tmp_path / "ours")
    folder = export_for_transformers(tmp_path / "ours", "last", tmp_path / "hf")
    sample = torch.randint(V, (2, 2048), generator=torch.Generator().manual_seed(1))
    padding, positions = torch.ones_like(sample), torch.cat((torch.arange(700), torch.arange(1348))).expand(2, -1)
    padding[0, :600] = 0
    logits = decoder.logits(sample)
    torch.save({
        "sample": sample, "padding": padding, "positions": positions, "whole": logits, "cached": logits,
        "packed": decoder.head(decoder(sample, AttentionLayout.from_positions(positions))),
        "padded": decoder.logits(sample[:1, 600:])[0],
        "continuation": list(generate(decoder, sample[0, 600:640].tolist(), 8, Sampling(temperature=0)))
    }, tmp_path / "case.pt")  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-P", "-c", WITHOUT_LM_2048, str(folder), str(tmp_path / "case.pt")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr


@torch.no_grad()
def test_a_normalizer_from_outside_leaves_in_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "roots.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    with PLUGINS.trust_user_text():
        plugin = LAYER_OPTIONS["roots:Power"](p=0.5)
    decoder, folder = moved(shape(plugin), 16, tmp_path)
    torch.testing.assert_close(of_transformers(folder)(tokens()[:, :16]).logits, decoder.logits(tokens()[:, :16]))


def test_exported_modules_import_torch_and_transformers_alone(tmp_path: Path):
    """transformers looks for the packages of every import statement before it loads a model from the hub."""
    _, folder = moved(shape(LayerList([opt.Relu2(), opt.StickBreaking(), opt.Entmax15()])), 16, tmp_path)
    packages = {name for file in folder.glob("*.py") for name in get_imports(file)}
    assert packages - sys.stdlib_module_names == {"torch", "transformers"}


def test_a_plugin_of_several_files_is_refused_by_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "strong").mkdir()
    (tmp_path / "strong" / "size.py").write_text("P = 0.1\n")
    (tmp_path / "strong" / "power.py").write_text("from strong.size import P\n" + PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    with PLUGINS.trust_user_text():
        options = LAYER_OPTIONS["strong.power:Power"]()
    PLUGINS.allow(["strong"])
    save_model(Decoder(shape(options), 20, 16), tmp_path / "ours")
    with pytest.raises(RunError, match=r"power.py:1: an export holds one file of a normalizer .* not strong.size"):
        export_for_transformers(tmp_path / "ours", "last", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


INTENDED_FAILURES = {  # of transformers' common tests
    # these have no parameters of normalizers, or no norms of queries and keys, that would stay in fp32
    *(f"Test{kind}::test_keep_in_fp32_modules_exist" for kind in ("Plain", "Elementwise", "Gated")),
    "TestTwoMaps::test_attention_outputs",  # twice as many weights as heads
}


@pytest.mark.slow
def test_the_common_tests_of_transformers_pass(tmp_path: Path):
    if "LM_TRANSFORMERS" not in os.environ:
        pytest.skip(
            "LM_TRANSFORMERS names no folder with transformers' source (see tests/huggingface/transformers_common.py)"
        )
    file, report = ROOT / "tests" / "huggingface" / "transformers_common.py", tmp_path / "report.xml"
    folders = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(file.parent)])
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", f"--junitxml={report}"]
    result = subprocess.run([*command, str(file)], text=True, capture_output=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": folders})  # fmt: skip
    cases = ElementTree.parse(report).findall(".//testcase") if report.exists() else []
    names = {case: f"{case.get('classname').split('.')[-1]}::{case.get('name')}" for case in cases}
    failed = {names[case] for case in cases if case.find("failure") is not None or case.find("error") is not None}
    assert failed == INTENDED_FAILURES, result.stdout[-5000:]
    assert len(cases) > 900


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_ours_with_blocks_recomputed(reentrant: bool, tmp_path: Path):
    decoder, folder = moved(shape(opt.SSMax()), 128, tmp_path)
    model, sample = of_transformers(folder).train(), tokens()[:, :65]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(sample, labels=sample).loss.backward()
    decoder.summed_loss(Batch.from_sequences(sample)).div(2 * 64).backward()
    parameters, names = dict(decoder.named_parameters()), dict(model.named_parameters())
    for name, parameter in parameters.items():
        exported_parameter = names["lm_head.weight" if name == "head.weight" else f"model.{name}"]
        torch.testing.assert_close(exported_parameter.grad, parameter.grad, rtol=1e-3, atol=1e-6)


def test_normalizers_and_norms_of_queries_and_keys_stay_in_fp32(tmp_path: Path):
    _, folder = moved(shape(opt.SSMax()), 64, tmp_path)
    model = of_transformers(folder, dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {name for name in dtypes if any(part in name for part in (".normalizer.", ".q_norm.", ".k_norm."))}
    assert model(tokens()[:, :64]).logits.isfinite().all()


def test_n_of_a_sample_is_refused_with_the_reason(tmp_path: Path):
    save_model(Decoder(ModelConfig(2, normalizer=opt.SSMax(n="sample")), 20, 16), tmp_path / "ours")
    result = lm("export", str(tmp_path / "ours"), "--format", "hf", "-o", str(tmp_path / "hf"))
    assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
    assert "normalizer.n = sample of ssmax is a length" in result.stderr
    assert not (tmp_path / "hf").exists()
