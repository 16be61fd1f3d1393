"""Configurations: every problem is reported at once, and nothing is silently ignored."""

import math
import re
from pathlib import Path

import pytest
import yaml

from lm.config.data_config import FileSource
from lm.config.eval_config import InferenceSetting, InferenceYarn
from lm.config.load import load_config, merge, parse_config, to_yaml
from lm.config.reference import reference_rows
from lm.config.schema import fields_along_path
from lm.config.tree import Config
from lm.config.yaml_text import parse_yaml, yaml_override
from lm.errors import ConfigError
from lm.experiments.definition import read_experiment
from lm.model.decoder import Decoder
from lm.model.swapped import with_inference_setting
from lm.plain import to_plain

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def has_names(path: str) -> bool:
    """Whether a key's block has a `name`, which picks its options."""
    metadata = fields_along_path(Config, path)[-1].metadata
    return "" not in metadata.get("blocks", [""]) and not isinstance(metadata["default"], list | dict)


def default_name(path: str) -> str:
    return fields_along_path(Config, path)[-1].metadata["default"]


def problems(*arguments: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as error:
        load_config(["name=x", *arguments])
    return {problem.key_path: str(problem) for problem in error.value.problems}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_shipped_configuration_is_valid(path: Path):
    if "experiments" in path.parts:
        assert read_experiment(path, []).name == path.stem
        return
    assert load_config([str(path)]).name == path.stem


def test_the_resolved_yaml_loads_as_the_same_configuration():
    config = load_config(
        [str(ROOT / "configs" / "ssmax.yaml"), "optim.lr=1e-4", "data.source={name: files, paths: [a.txt]}"]
    )
    assert isinstance(config.data.source, FileSource)
    assert parse_config(yaml.safe_load(to_yaml(config))) == config


def test_overrides_win_over_files_and_files_over_their_bases(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("optim: {lr: 0.1, optimizer: {beta1: 0.5}}\nseed: 3\n")
    (tmp_path / "child.yaml").write_text("base: base.yaml\noptim: {lr: 0.2}\n")
    (tmp_path / "other.yaml").write_text("seed: 4\n")
    config = load_config([str(tmp_path / "child.yaml"), str(tmp_path / "other.yaml"), "optim.optimizer.beta2=0.9"])
    optimizer = config.optim.optimizer
    assert (config.optim.lr, optimizer.beta1, optimizer.beta2, config.seed, config.name) == (0.2, 0.5, 0.9, 4, "child")


def test_all_problems_are_reported_at_once_with_path_value_and_remedy():
    messages = problems(
        "optim.lr=-1", "modle.n_layer=3", "model.normalizer=ssmaxx", "trainer.max_steps=many", "data.seq_len=300"
    )
    assert set(messages) == {"optim.lr", "modle", "model.normalizer.name", "trainer.max_steps"}
    assert "did you mean 'model'" in messages["modle"]
    assert "did you mean 'ssmax'" in messages["model.normalizer.name"]
    assert "-1" in messages["optim.lr"]
    assert "must be > 0" in messages["optim.lr"]
    assert "8100 or 8400" in problems("data.seq_len=300")["optim.batch_tokens"]


@pytest.mark.parametrize("key", [path for path, *_ in reference_rows(Config) if "[" not in path and has_names(path)])
def test_a_wrong_option_is_one_problem(key: str):
    """Contradictions with the defaults of a block that is refused name keys that nobody set."""
    messages = problems("eval.long_context.length_factor=8", f"{key}={{name: {default_name(key)}, wrong: 1}}")
    assert list(messages) == [f"{key}.wrong"]


def test_a_value_of_three_question_marks_must_be_given_whatever_the_key(tmp_path: Path):
    paths = [path for path, *_ in reference_rows(Config) if not re.search(r"[\[\]*<]", path)]
    assert len(paths) > 100
    for path in paths:
        with pytest.raises(ConfigError, match="must be given; replace"):
            load_config(["configs/softmax.yaml", f"{path}=???"])
    (tmp_path / "a.yaml").write_text("data: {source: {name: files, paths: ['???']}, tasks: [{task: {name: '???'}}]}")
    with pytest.raises(ConfigError) as error:
        load_config(["configs/softmax.yaml", str(tmp_path / "a.yaml")])
    assert {"data.source.paths[0]", "data.tasks[0].task.name"} <= {problem.key_path for problem in error.value.problems}


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
        ("model.normalizer={name: ssmax, scale: none, init: 0.4}", "model.normalizer.init"),
        ("model.normalizer={name: log_n, base: 1}", "model.normalizer.base"),
        ("model.n_head=3", "model.n_embd"),
        ("model.position=learned", "eval.long_context.length_factor"),
        ("model.position=none", "eval.long_context.inference[1].rope"),
        ("eval.long_context.inference=[{}, {}]", "eval.long_context.inference"),
        ("eval.needle.length_factors=[65537]", "eval.needle.length_factors"),
        ("eval.long_context.inference=[{normalizer: {clip: true}}]", "eval.long_context.inference[0].normalizer.clip"),
        ("eval.long_context.inference=[{rope: {name: yarn, fast: 1}}]", "eval.long_context.inference[0].rope.fast"),
        (
            "eval.long_context.inference=[{rope: {name: theta, factor: 1e-4}}]",
            "eval.long_context.inference[0].rope.factor",
        ),
        ("optim.batch_tokens=1000", "optim.batch_tokens"),
        ("data.tasks=[{task: {name: mqar, pairs: 65}}]", "data.tasks[0].task.pairs"),
        ("trainer.micro_batch=5", "trainer.micro_batch"),
        ("data.source=files", "data.source.paths"),
        ("data.tokenizer=file", "data.tokenizer.path"),
        ("data.source={name: package, paths: [a.txt]}", "data.source.paths"),
        ("name=a/b", "name"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_key(override: str, path: str):
    assert path in problems(override)


@pytest.mark.parametrize(
    "value",
    ["a # b", "1e3", "true", "", "\U0001f600 \u2028", "a: b", 1e-5, math.inf, None, False, [1, "x, y"], {"a": [None]}],
)
def test_an_override_is_read_back_as_it_was_given(value: object):
    key, _, text = yaml_override("eval.texts", value).partition("=")
    read = parse_yaml(text, "override")
    assert (key, read, type(read)) == ("eval.texts", value, type(value))


@pytest.mark.parametrize(
    ("normalizer", "change", "said"),
    [
        ("log_n", "clip: true", None),
        ("[log_n, ssmax]", "clip: true, n: sample", None),
        ("log_n", "clip: 1", r"normalizer\.clip = 1: must be true or false"),
        ("log_n", "base: 0.5", r"normalizer\.base = 0\.5: must be >= 2"),
        ("ssmax", "n: wide", r"normalizer\.n = 'wide': unknown row length"),
        ("ssmax", "clip: true", r"normalizer\.clip = true: no normalizer of this model has this option"),
        ("ssmax", "bias: true", r"normalizer\.bias = true: decides whether there is a b to learn"),
        ("[log_n, ssmax]", "init: 1.0", r"normalizer\.init = 1\.0: is an initial value"),
        ("ssmax", "name: softmax", r"normalizer\.name = 'softmax': no normalizer of this model has this option"),
    ],
)
def test_an_inference_setting_may_set_those_options_of_normalizers_that_training_has_not_fixed(
    normalizer: str, change: str, said: str | None
):
    arguments = [
        "name=x",
        "data.source={name: files, paths: [a.txt]}",
        "model.n_layer=2",
        f"model.normalizer={normalizer}",
    ]
    arguments.append(f"eval.recall.inference=[{{normalizer: {{{change}}}}}]")
    arguments.append("data.tasks=[{weight: 1, task: {name: mqar, keys: 16, values: 16, pairs: 4, queries: 4}}]")
    arguments += ["eval.long_context.length_factor=0", "data.seq_len=64"]
    if said is None:
        assert load_config(arguments).eval.recall.inference[0].label.startswith("as trained, clip=true")
    else:
        with pytest.raises(ConfigError, match=said):
            load_config(arguments)


def test_a_temperature_of_rope_is_refused_where_the_normalizer_would_undo_it():
    def inference(temperature: str) -> list[str]:
        setting = f"eval.long_context.inference=[{{rope: {{name: yarn, temperature: {temperature}}}}}]"
        return [
            "name=x",
            "data.source={name: files, paths: [a.txt]}",
            "model.n_layer=2",
            "model.normalizer=[softmax, cosine]",
            setting,
        ]

    assert load_config(inference("false")).eval.long_context.inference[0].label == "yarn, temperature 0"
    with pytest.raises(
        ConfigError, match=r"inference\[0\]\.rope\.temperature = true: is a factor on queries, and none on"
    ):
        load_config(inference("true"))
    linear = "model.normalizer={name: linear, features: identity, n: visible}"  # a factor on q is one on its scores
    assert load_config([*inference("true"), linear]).eval.long_context.inference[0].label == "yarn"
    config = load_config(inference("false"))
    with pytest.raises(ConfigError, match=r"inference\.rope\.temperature = true: .* scores of cosine; set it to false"):
        with_inference_setting(Decoder(config.model, 300, 32), InferenceSetting(InferenceYarn()))


@pytest.mark.parametrize("name", ["0", "false", "{}"])
def test_a_name_that_is_no_text_is_refused(name: str):
    with pytest.raises(ConfigError, match="must be text; "):
        load_config(["softmax", f"name={name}"])


def test_a_renamed_block_drops_the_options_of_the_old_name():
    base = {"model": {"normalizer": {"name": "ssmax", "init": 0.4}}}
    assert merge(base, {"model": {"normalizer": "softmax"}}) == {"model": {"normalizer": {"name": "softmax"}}}
    assert merge(base, {"model": {"normalizer": {"bias": True}}})["model"]["normalizer"] == {
        "name": "ssmax",
        "init": 0.4,
        "bias": True,
    }
    unnamed = {"optim": {"schedule": {"final_fraction": 0.2}}}
    assert merge(unnamed, {"optim": {"schedule": "wsd"}}) == {
        "optim": {"schedule": {"final_fraction": 0.2, "name": "wsd"}}
    }
    listed = {"model": {"normalizer": ["window", "softmax"]}}  # an error, as of no layer
    layers = {"model": {"normalizer": {"name": "layers", "of": ["window", "softmax"], "temperature": 0.5}}}
    assert merge(listed, {"model": {"normalizer": {"temperature": 0.5}}}) == layers


def test_null_turns_off_a_block_that_may_be_null(tmp_path: Path):
    file = tmp_path / "all.yaml"
    file.write_text("eval: {by_length: {}}\n")
    assert load_config([str(file)]).eval.by_length
    assert load_config([str(file), "eval.by_length=null"]).eval.by_length is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"seed: 1\nseed: 2\n", "found duplicate key seed"),
        (b"- 1\n", "must hold keys and values, not [1]"),
        (b"name: caf\xe9\n", "decode byte 0xe9 in position 9"),
        (b"optim:\n\tlr: 1\n", "cannot start any token at line 2, column 1"),
        (b"seed: !!python/object/apply:os.getpid []\n", "could not determine a constructor for the tag"),
        (b"seed: !!timestamp 2020-01-01\n", "seed = datetime.date(2020, 1, 1): must be an integer"),
        (b"seed: 1\n---\nseed: 2\n", "expected a single document"),
        (b'runs: "a\\0b"\n', "runs = 'a\\x00b': must be text"),
        (b"seed: " + b"9" * 9000, "Exceeds the limit (4300 digits)"),
        (b"data: " + b"[" * 400 + b"]" * 400, "is nested more than 50 deep"),
        (b"a: &a [*a]\n", "recursive aliases are not supported"),
        (
            b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n + 1, n + 1, n, n) for n in range(60)),
            "node expansion exceeds the configured limit of 10000",
        ),
        (
            b"a0: &a0 {x: 1}\n" + b"".join(b"a%d: &a%d {<<: [*a%d, *a%d]}\n" % (n + 1, n + 1, n, n) for n in range(60)),
            "node expansion exceeds the configured limit of 10000",
        ),
        (b"#" * (2**19 + 1), "larger than 524,288 bytes"),
        (b"base: file.yaml\n", "inherits from itself"),
        (b"base: nowhere.yaml\n", "nowhere.yaml: no such configuration file (a base of file.yaml)"),
        (b"base: {a: b}\n", "base = {a: 'b'}: must be a file or a list of files"),
    ],
    ids=lambda value: value[:24] if isinstance(value, bytes) else None,
)
def test_a_configuration_file_that_cannot_be_read_is_an_error_of_one_line(text: bytes, reason: str, tmp_path: Path):
    (tmp_path / "file.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=re.escape(reason)) as error:
        load_config([str(tmp_path / "file.yaml"), "name=x"])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_paths_that_name_no_file_are_errors_of_one_line(tmp_path: Path):
    (tmp_path / "twice.yaml").write_text("seed: 1\n")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for name, reason in {"twise.yaml": "twice.yaml'", "loop.yaml": "loop", "": "Is a directory"}.items():
        with pytest.raises(ConfigError, match=reason):
            load_config([str(tmp_path / name)])
    with pytest.raises(ConfigError, match="YAML"):
        load_config([])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("model.normalizer={name: [ssmax]}", "model.normalizer.name = ['ssmax']: unknown name"),
        ("optim.lr=1" + "0" * 400, "must be a number"),
        ("trainer.threads=10000000000", "trainer.threads = 10000000000: must be >= 1 and <= 1024"),
        ("optim.lr=.inf", "optim.lr = inf: must be a number"),
        ("data.lengths={.nan: 32}", "data.lengths = {nan: 32}: must be"),
        (r'name="a\nb"', "must be the name of a folder"),
        ("name=run #3", "' #' begins a comment in YAML; quote the value"),
        ("name=${runs}${nothing.here}", "Interpolation key 'nothing.here' not found"),
        ("name=${oc.env:LM_TEST_NOT_SET}", "name: Environment variable 'LM_TEST_NOT_SET' not found"),
        ("seed=${oc.env:LM_TEST_NOT_SET, '7'}", "seed = '7': must be an integer"),
        ("data.lengths={name: mixed, weights: {064: 0.5, 128: 0.5}}", "{064: 0.5, 128: 0.5}: must be a map"),
    ],
    ids=lambda value: value[:32],
)
def test_an_override_that_means_nothing_is_an_error_that_names_it(override: str, reason: str):
    with pytest.raises(ConfigError, match=re.escape(reason)) as error:
        load_config(["name=x", "runs=r", "optim.lr=0.1", "phases=[{until: 1}]", override])
    assert all(len(line) < 600 for line in str(error.value).splitlines())


def test_an_interpolation_has_the_value_and_type_of_what_it_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LM_TEST_STEPS", "7")
    config = load_config(
        [
            "name=run-${seed}-${model.bias}",
            "seed=3",
            "model.bias=true",
            "trainer.max_steps=${oc.decode:${oc.env:LM_TEST_STEPS}}",
            "trainer.checkpoint_every=${trainer.max_steps}",
            "optim.warmup_steps=${trainer.max_steps}",
            "data.root=${oc.env:LM_TEST_NOT_SET, default}",
            "phases=[{until: 0.5, normalizer: softmax}, {until: 1, normalizer: ssmax}]",
            "optim.groups.head=${optim.groups.embedding}",
            "optim.groups.embedding={lr_factor: 0.5}",
            "eval.needle.depths=${eval.recall.length_factors}",
            "eval.recall.length_factors=[1, '${phases.0.until}']",
        ]
    )
    assert (config.name, config.trainer.max_steps, config.trainer.checkpoint_every, config.data.root) == (
        "run-3-True",
        7,
        7,
        "default",
    )
    assert (config.optim.groups.head.lr_factor, config.eval.needle.depths) == (0.5, [1.0, 0.5])


def test_every_key_has_a_description_and_a_valid_default():
    for path, _, _, text in reference_rows(Config):
        assert text, path
    assert parse_config({**to_plain(Config()), "name": "x"}) == Config(name="x")


def test_an_option_of_another_block_of_that_key_is_said_to_be_that():
    with pytest.raises(
        ConfigError, match=r"^optim\.optimizer\.momentum = 0\.9: unknown key; it is an option of muon, not of adamw$"
    ):
        load_config(["name=x", "optim.optimizer.momentum=0.9"])
    with pytest.raises(
        ConfigError, match=r"^model\.normalizer\.bias = true: unknown key; it is an option of ssmax.*, not of softmax$"
    ):
        load_config(["name=x", "model.normalizer={name: softmax, bias: true}"])


def test_a_dotted_key_in_a_file_is_the_key_of_its_block(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("optim.schedule.final_fraction: 0.2\noptim: {lr: 0.1}\n")
    optim = load_config([str(tmp_path / "mine.yaml")]).optim
    assert (optim.schedule.final_fraction, optim.lr) == (0.2, 0.1)
    (tmp_path / "mine.yaml").write_text("optim.lr: 0.2\noptim: {lr: 0.1}\n")
    with pytest.raises(ConfigError, match=r"optim\.lr: given twice in one block; drop one$"):
        load_config([str(tmp_path / "mine.yaml")])


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("lr=1e-3", "did you mean optim.lr?"),
        ("max_steps=3", "did you mean trainer.max_steps?"),
        ("beta1=0.9", "did you mean optim.optimizer.beta1?"),
        ("xxxx=1", "choose from: name, runs"),
        ("n_head=3", "did you mean model.n_head?"),
        ("seqlen=64", "did you mean data.seq_len?"),
        ("eval.length_facto=3", "did you mean eval.long_context.length_factor or eval.diagnostics.length_factor?"),
        ("lengths=full", "did you mean data.lengths or eval.by_length.lengths?"),
        ("model.normalizer={name: ssmax, n: 128}", "quote it in the YAML (row length n: `visible` keys, length of the"),
        ("model.normalizer={name: ssmax, n: '128'}", "write fixed:128"),
        ("model.normalizer=SSMax", "did you mean 'ssmax'?"),
        ("model.n_head=3", "is not a multiple of model.n_head = 3; make it a multiple of 6, or"),
        (
            "model={n_head: 6, n_embd: 258}",
            "gives heads of odd size 43, which RoPE can't rotate; make it a multiple of 12",
        ),
        ("data.lengths={name:mixed}", "write a space after the colon"),
        ("model.normalizer={name: p_n, window: 3}", "unknown key; choose from: nothing"),
    ],
)
def test_advice_on_a_wrong_key_or_value_names_the_right_one(override: str, advice: str):
    (message,) = problems(override).values()
    assert advice in message
