"""Layout strings: layers of each stage, and the character that a wrong string is refused for."""

import re

import pytest

from megatron.config.plan.pipeline_layout import expand, parse_layout, split_with_ends


@pytest.mark.parametrize(
    "layout, want",
    [
        ("Ett|tL", "Ett|tL"),
        ("Et*3|(tt|)*2,L", "Ettt|tt|tt|L"),
        ("E,t,|,t*2,L", "Et|ttL"),
        ("E(|t*2)*2|L", "E|tt|tt|L"),
        ("Et|*2L", "Et||L"),
        ("Et*12L", "E" + "t" * 12 + "L"),
    ],
)
def test_repetition(layout, want):
    assert "".join(item.symbol for item in expand(layout)) == want


@pytest.mark.parametrize(
    "layout, num_layers, stages, want",
    [
        ("Ettt|tL", 4, 2, ([3], [1])),
        ("E|tt|t|tL", 4, 2, ([0, 1], [2, 1])),
        ("E|(t|)*6,L", 6, 4, ([0, 1], [1, 1], [1, 1], [1, 0])),
        ("EttL", 2, 1, ([2],)),
    ],
)
def test_layers_of_each_stage(layout, num_layers, stages, want):
    split = parse_layout(layout, num_layers, stages)
    assert tuple([len(chunk) for chunk in stage] for stage in split) == want
    in_order = [n for c in range(len(split[0])) for stage in split for n in stage[c]]
    assert in_order == list(range(num_layers))


@pytest.mark.parametrize(
    "layout, position",
    [
        ("Ett|mtt|L", 5),
        ("Ett|ttx|L", 7),
        ("Ett|tt(|L", 7),
        ("Ett|((tt|)*2L", 6),
        ("Ett|tt)L", 7),
        ("Ett|(tt)|L", 5),
        ("Ett|()*2L", 5),
        ("Ettt*|tL", 5),
        ("Ettt*0|tL", 5),
        ("E*2|t|L", 1),
        ("*2", 1),
        ("tE|tttL", 1),
        ("Ett|ttLt", 8),
        ("EtE|tttL", 3),
        ("EtL|tttL", 3),
        ("Ett|ttt|L", 7),
        ("Et|t*4L", 4),
        ("Ett|tL", 6),
        ("Ett||tt|L", 5),
        ("Ett|t|tL", 8),
        ("Ett tt|L", 4),
        ("Et*999999999|L", 3),
        ("E(t*90000|)*90000L", 12),
    ],
)
def test_a_wrong_string_names_the_position(layout, position):
    with pytest.raises(ValueError, match=rf"{re.escape(layout)}, character {position}: ") as error:
        parse_layout(layout, 4, 2)
    assert "\n" not in str(error.value)


def test_layers_of_multi_token_prediction_are_before_the_loss():
    assert parse_layout("Ett|ttmmL", 4, 2, depths=2) == parse_layout("Ett|ttL", 4, 2)
    for layout, position in (("Ett|ttmL", 6), ("Ett|mttL", 6), ("Ett|ttm|mL", 8), ("mEtt|ttL", 1)):
        with pytest.raises(ValueError, match=f"character {position}: "):
            parse_layout(layout, 4, 2, depths=2)


def test_layers_of_multi_token_prediction_before_the_stage_of_the_loss():
    assert parse_layout("Ett|tt|mm|L", 4, 4, depths=2) == parse_layout("Ett|tt|L", 4, 3)[:2] + (
        (range(4, 4),),
        (range(4, 4),),
    )
    assert parse_layout("Ettttmm|L", 4, 2, depths=2) == ((range(4),), (range(4, 4),))
    # a rank holds the embedding once
    with pytest.raises(ValueError, match="character 8: "):
        parse_layout("Et|t|ttm|L", 4, 2, depths=1)


def test_virtual_stages_must_be_those_typed():
    assert parse_layout("E|tt|t|tL", 4, 2, 2) == parse_layout("E|tt|t|tL", 4, 2)
    with pytest.raises(ValueError, match="4 virtual stages"):
        parse_layout("E|tt|t|tL", 4, 2, 1)
    with pytest.raises(ValueError, match="character 2"):
        parse_layout("E|tL", 1, 1)


def test_embedding_and_loss_count_as_layers():
    def sizes(*args) -> list[list[int]]:
        return [[len(chunk) for chunk in stage] for stage in split_with_ends(*args)]

    assert sizes(6, 4, 1, True, True) == [[1], [2], [2], [1]]
    assert sizes(6, 2, 2, True, True) == [[1, 2], [2, 1]]
    assert sizes(7, 4, 1, True, False) == [[1], [2], [2], [2]]
    assert sizes(2, 4, 1, True, True) == [[0], [1], [1], [0]]
    with pytest.raises(ValueError, match="--num-layers 6 or 10"):
        split_with_ends(7, 4, 1, True, True)
