"""Configurations: every problem is reported at once, and nothing is silently ignored."""

import subprocess
import sys
from pathlib import Path

import pytest

from lm.attention import catalogue
from lm.config.data_config import Files
from lm.config.load import load, merge, parse, reference_markdown, to_yaml
from lm.config.tree import Config
from lm.errors import ConfigError
from lm.schema import reference, to_plain

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml"))


def problems(*arguments: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(["name=x", *arguments])
    return {problem.path: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_shipped_configuration_is_valid(path: Path):
    arguments = [str(path)]
    if "models" in path.parts:
        arguments.append("data.seq_len=1024")
    config = load(arguments)
    assert config.name == path.stem


def test_the_resolved_yaml_loads_as_the_same_configuration():
    import yaml

    config = load([str(ROOT / "configs" / "ssmax.yaml"), "optim.lr=1e-4", "data.source={name: files, paths: [a.txt]}"])
    assert isinstance(config.data.source, Files)
    assert parse(yaml.safe_load(to_yaml(config))) == config


def test_overrides_win_over_files_and_files_over_their_bases(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("optim: {lr: 0.1, optimizer: {beta1: 0.5}}\nseed: 3\n")
    (tmp_path / "child.yaml").write_text("base: base.yaml\noptim: {lr: 0.2}\n")
    (tmp_path / "other.yaml").write_text("seed: 4\n")
    config = load([str(tmp_path / "child.yaml"), str(tmp_path / "other.yaml"), "optim.optimizer.beta2=0.9"])
    optimizer = config.optim.optimizer
    assert (config.optim.lr, optimizer.beta1, optimizer.beta2, config.seed, config.name) == (0.2, 0.5, 0.9, 4, "child")


def test_all_problems_are_reported_at_once_with_path_value_and_remedy():
    found = problems("optim.lr=-1", "modle.n_layer=3", "model.normalizer=ssmaxx", "trainer.max_steps=many", "data.seq_len=300")
    assert set(found) == {"optim.lr", "modle", "model.normalizer.name", "trainer.max_steps", "optim.batch_tokens"}
    assert "did you mean 'model'" in found["modle"]
    assert "did you mean 'ssmax'" in found["model.normalizer.name"]
    assert "-1" in found["optim.lr"]
    assert "must be > 0" in found["optim.lr"]
    assert "8100 or 8400" in found["optim.batch_tokens"]


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("optim.lr=nan", "optim.lr"),
        ("optim.lr=true", "optim.lr"),
        ("trainer.max_steps=1.5", "trainer.max_steps"),
        ("model.bias=1", "model.bias"),
        ("trainer.precision=16", "trainer.precision"),
        ("model.position.fraction=0", "model.position.fraction"),
        ("model.normalizer={name: softmax, init: 1.0}", "model.normalizer.init"),
        ("model.normalizer={name: ssmax, n: fixed}", "model.normalizer.n"),
        ("model.normalizer={name: ssmax, n: fixed:0}", "model.normalizer.n"),
        ("model.normalizer={name: ssmax, scale: none, init: 0.4}", "model.normalizer.init"),
        ("model.normalizer={name: log_n, base: 1}", "model.normalizer.base"),
        ("model.n_head=3", "model.n_embd"),
        ("model.position=learned", "eval.long_context.length_factor"),
        ("model.position=none", "eval.long_context.inference[1].rope"),
        ("eval.long_context.length_factor=0.5", "eval.long_context.length_factor"),
        ("eval.long_context.inference=[{}, {}]", "eval.long_context.inference"),
        ("eval.long_context.inference=[{normalizer: {clip: true}}]", "eval.long_context.inference[0].normalizer.clip"),
        ("eval.long_context.inference=[{rope: {name: yarn, fast: 1}}]", "eval.long_context.inference[0].rope.fast"),
        ("optim.warmup_steps=2000", "optim.warmup_steps"),
        ("optim.schedule={name: wsd, decay_fraction: 0.95}", "optim.schedule.decay_fraction"),
        ("optim.batch_tokens=1000", "optim.batch_tokens"),
        ("trainer.micro_batch=5", "trainer.micro_batch"),
        ("data.source=files", "data.source.paths"),
        ("data.source=hub", "data.source.dataset"),
        ("data.tokenizer=file", "data.tokenizer.path"),
        ("data.source={name: package, paths: [a.txt]}", "data.source.paths"),
        ("name=a/b", "name"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_key(override: str, path: str):
    assert path in problems(override)


@pytest.mark.parametrize(
    ("normalizer", "change", "said"),
    [
        ("log_n", "clip: true", None),
        ("[log_n, ssmax]", "clip: true, n: sample", None),
        ("log_n", "clip: 1", r"normalizer\.clip = 1: must be true or false"),
        ("log_n", "base: 0.5", r"normalizer\.base = 0\.5: must be > 1"),
        ("ssmax", "n: wide", r"normalizer\.n = 'wide': unknown row length"),
        ("ssmax", "clip: true", r"normalizer\.clip = True: no normalizer of this model has this option"),
        ("ssmax", "bias: true", r"normalizer\.bias = True: decides whether there is a b to learn"),
        ("[log_n, ssmax]", "init: 1.0", r"normalizer\.init = 1\.0: is a first value"),
        ("ssmax", "name: softmax", r"normalizer\.name = 'softmax': no normalizer of this model has this option"),
    ],
)
def test_an_inference_setting_may_set_those_options_of_normalizers_that_training_has_not_fixed(
    normalizer: str, change: str, said: str | None
):
    arguments = ["name=x", "data.source={name: files, paths: [a.txt]}", "model.n_layer=2", f"model.normalizer={normalizer}"]
    arguments.append(f"eval.recall.inference=[{{normalizer: {{{change}}}}}]")
    arguments.append("data.tasks=[{weight: 1, task: {name: mqar, keys: 16, values: 16, pairs: 4, queries: 4}}]")
    arguments += ["eval.long_context.length_factor=0", "data.seq_len=64"]
    if said is None:
        assert load(arguments).eval.recall.inference[0].label.startswith("as trained, clip=true")
    else:
        with pytest.raises(ConfigError, match=said):
            load(arguments)


def test_a_renamed_block_drops_the_options_of_the_old_name():
    under = {"model": {"normalizer": {"name": "ssmax", "init": 0.4}}}
    assert merge(under, {"model": {"normalizer": "softmax"}}) == {"model": {"normalizer": {"name": "softmax"}}}
    assert merge(under, {"model": {"normalizer": {"bias": True}}})["model"]["normalizer"] == {"name": "ssmax", "init": 0.4, "bias": True}
    assert merge({"n": {"bias": True}}, {"n": "ssmax"}) == {"n": {"bias": True, "name": "ssmax"}}
    assert merge({"position": "rope"}, {"position": {"theta": 5.0}}) == {"position": {"name": "rope", "theta": 5.0}}


def test_the_order_of_overrides_of_one_block_does_not_matter():
    there = load(["name=x", "model.normalizer=ssmax", "model.normalizer.bias=true"])
    back = load(["name=x", "model.normalizer.bias=true", "model.normalizer=ssmax"])
    assert there == back
    assert back.model.normalizer.bias


def test_configuration_files_that_cannot_be_read_are_named(tmp_path: Path):
    (tmp_path / "twice.yaml").write_text("seed: 1\nseed: 2\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "loop.yaml").write_text("base: loop.yaml\n")
    (tmp_path / "orphan.yaml").write_text("base: nowhere.yaml\n")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "ref.yaml").write_text("seed: ${nothing.here}\n")
    for name, text in {
        "twice.yaml": "not valid YAML",
        "list.yaml": "keys and values",
        "loop.yaml": "inherits from itself",
        "orphan.yaml": "nowhere.yaml",
        "bytes.yaml": "not valid YAML",
        "ref.yaml": "nothing",
        "twise.yaml": "did you mean 'twice.yaml'",
    }.items():
        with pytest.raises(ConfigError, match=text):
            load([str(tmp_path / name)])
    with pytest.raises(ConfigError, match="YAML"):
        load([])


def test_the_generated_references_in_the_docs_are_current():
    assert (ROOT / "docs" / "config.md").read_text() == reference_markdown(), "run: lm config --reference > docs/config.md"
    assert (ROOT / "docs" / "normalizers.md").read_text() == catalogue.markdown(), "run: lm normalizers > docs/normalizers.md"


def test_every_key_has_a_description_and_a_valid_default():
    for path, _, _, text in reference(Config):
        assert text, path
    assert parse({**to_plain(Config()), "name": "x"}) == Config(name="x")


def test_every_normalizer_has_a_formula_and_a_source():
    for name, entry in catalogue.ENTRIES.items():
        assert entry.options.name == name
        assert entry.options.full_formula
        assert entry.source


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "lm", *arguments], capture_output=True, text=True, check=False)


def test_a_typo_exits_2_with_one_line_and_no_traceback():
    result = run("train", str(ROOT / "configs" / "ssmax.yaml"), "optim.lrr=1")
    assert result.returncode == 2
    assert result.stderr == "error: optim.lrr = 1: unknown key; did you mean 'lr'?\n"
    assert result.stdout == ""


def test_configuration_help_and_errors_import_neither_torch_nor_lightning():
    code = (
        "import sys; from lm.cli import app; from typer.testing import CliRunner; r = CliRunner();"
        "assert r.invoke(app, ['--help']).exit_code == 0;"
        "assert r.invoke(app, ['config', 'name=x']).exit_code == 0;"
        "r.invoke(app, ['train', 'optim.lr=-1']);"
        "print([m for m in ('torch', 'lightning', 'wandb', 'datasets') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("kind", "off"),
    [("recall", "length_factors=[]"), ("needle", "length_factors=[]"), ("long_context", "length_factor=0")],
)
def test_a_misspelt_option_of_an_evaluation_that_is_off_is_an_error(kind: str, off: str):
    where = f"eval.{kind}.inference"
    with pytest.raises(ConfigError, match=rf"{where}\[0\]\.normalizer\.clpi = True: no normalizer of this model has this option"):
        load(["configs/softmax.yaml", "model.normalizer=log_n", f"eval.{kind}.{off}", f"{where}=[{{normalizer: {{clpi: true}}}}]"])
