"""What the project tells pip, and what it tells its users to tell pip."""

import re
import tomllib

from conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {
    requirement.partition(";")[0].strip()
    for extra in PROJECT["optional-dependencies"].values()
    for requirement in extra
}
TEXTS = [ROOT / "README.md", ROOT / "Dockerfile"]
TEXTS += [
    path
    for folder in ("lm", "docs", "scripts", "configs")
    for path in (ROOT / folder).rglob("*.*")
    if path.suffix != ".png"
]


def wrong_hints(text: str) -> list[str]:
    """What a text asks pip to install that is neither a requirement of ours by its own name nor the clone itself.

    `lm` is another's distribution, and ours is on no index: neither can be named.
    """
    words = [word.strip("'") for hint in re.findall(r"pip install ([^`\"\n;)]*)", text) for word in hint.split()]
    names = [word for word in words if not word.startswith(("-", "$", "{", "."))]
    return [word for word in names if word not in OPTIONAL] + re.findall(
        r"(?<![\w.-])lm(?:-normalizers)?\[[a-z]+\]", text
    )


def test_the_distribution_is_not_the_stranger_of_the_package_index():
    assert PROJECT["name"] == "lm-normalizers"
    assert PROJECT["scripts"] == {"lm": "lm.cli:main"}


def test_hints_name_what_pip_installs_in_a_clone_and_after_an_installation():
    texts = {path: path.read_text(encoding="utf-8") for path in TEXTS if "__pycache__" not in path.parts}
    assert {path: wrong_hints(text) for path, text in texts.items() if wrong_hints(text)} == {}
