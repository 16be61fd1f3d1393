"""What a user sees stays as it is, unless a change of it is meant (tests/inventory.py)."""

import pytest
import yaml
from inventory import FROZEN, PARTS, differences, frozen, typed

REMEDY = "If it is meant, write it down, and say why in the commit: python tests/inventory.py --write"


@pytest.mark.parametrize("part", PARTS)
def test_what_a_user_sees_is_as_it_was(part: str):
    lines = differences(PARTS[part](), frozen(part))
    assert not lines, "\n".join(
        [f"{part}: {len(lines)} lines of tests/inventory.yaml differ (- was, + is):", *lines, REMEDY]
    )


def test_nothing_is_written_down_that_is_not_compared():
    assert list(yaml.safe_load(FROZEN.read_text(encoding="utf-8"))) == list(PARTS)


def test_what_differs_is_named():
    tree = {"a": {"x": "text", "y": ["1", "2"]}, "b": "integer"}
    assert differences(tree, tree) == []
    assert differences(tree, {"a": {"x": "number", "y": ["1", "2", "3"]}}) == [
        "-a > x: number",
        "+a > x: text",
        "-a > y: 3",
        "+b: integer",
    ]
    assert differences({"a": "1", "b": "2"}, {"b": "2", "a": "1"}), (
        "the order of commands, options and parameters is seen, too"
    )


def test_types_are_of_all_values_in_a_place():
    documents = [{"a": 1, "of": [{"b": None}, {"b": 0.5, "c": "x"}], "by": {"0.weight": [True]}}, {"of": [], "by": {}}]
    assert typed(documents) == {
        "a": "integer, sometimes missing",
        "by.*[]": "boolean",
        "of[].b": "null or number",
        "of[].c": "text, sometimes missing",
    }
    assert typed([{"sizes": {}, "rows": []}]) == {"rows": "list", "sizes": "map"}
