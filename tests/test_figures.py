"""Figures of a round: every node, slot and round is drawn where it belongs, and a slider redraws."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.kit import script
from tests.test_report import make_grid
from treedraft import figures, report
from treedraft.speculate import Round
from treedraft.trees.tree import DraftTree

# root; a b under it; c d under a; e under b
TOKENS = [10, 11, 12, 13, 14, 15]
PARENTS = [-1, 0, 0, 1, 1, 2]
WORDS = {10: "root", 11: " a", 12: "b", 13: "c\n", 14: "d", 15: "e", 16: "bonus"}


@pytest.fixture
def tree() -> DraftTree:
    return script(TOKENS, PARENTS)


def words(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def size(picture: figures.Picture) -> tuple[int, int]:
    image = Image.open(io.BytesIO(picture._repr_png_()))
    assert image.format == "PNG"
    return image.size


def test_white_space_is_made_visible() -> None:
    assert figures.visible(" a\n") == "␣a↵"
    assert figures.visible("\n        x") == "↵␣×8x"
    assert figures.visible("") == "∅"


def test_a_tree_shows_every_node_and_the_accepted_path(tree: DraftTree) -> None:
    picture = figures.tree_figure(tree, WORDS.__getitem__, path=[0, 2, 5], bonus=16)
    axes = picture.figure.axes[0]
    boxes = {text.get_text(): text for text in axes.texts if text.get_bbox_patch() is not None}
    assert set(boxes) == {"root", "␣a", "b", "c↵", "d", "e", "bonus"}
    blue = figures.accepted_colour()
    filled = {word for word, text in boxes.items() if tuple(text.get_bbox_patch().get_facecolor()[:3]) == pytest.approx(blue)}
    assert filled == {"b", "e"}
    # The first child goes on in its parent's row; a child is right of its parent, siblings stand below each other.
    place = {word: text.get_position() for word, text in boxes.items()}
    assert place["root"][1] == place["␣a"][1] == place["c↵"][1] < place["d"][1] < place["b"][1] == place["e"][1] == place["bonus"][1]
    assert place["root"][0] < place["␣a"][0] < place["c↵"][0] and place["e"][0] < place["bonus"][0]
    assert words(axes).count("0.37") == 5  # log q of -1 a level
    assert size(picture)[0] > 100 and "draft tree" in repr(picture)


def test_no_two_boxes_of_a_tree_share_a_place() -> None:
    parents = [-1, 0, 0, 0, 1, 1, 2, 4, 5, 7, 3, 3]
    rows = figures._rows(script(list(range(12)), parents).children())
    depths = script(list(range(12)), parents).depths.tolist()
    assert len(set(zip(rows, depths, strict=True))) == 12
    assert sorted(set(rows)) == list(range(max(rows) + 1))


def test_a_mask_has_a_row_a_node_and_the_prefix_before_it(tree: DraftTree) -> None:
    picture = figures.mask_figure(tree, WORDS.__getitem__, prefix_length=7, path=[0, 2, 5])
    axes = picture.figure.axes[0]
    T, S, _ = 2, 1, 0  # on the path, seen, hidden
    expected = [
        [T, 0, T, _, _, _, _, _],
        [S, 0, S, S, _, _, _, _],
        [T, 0, T, _, T, _, _, _],
        [S, 0, S, S, _, S, _, _],
        [S, 0, S, S, _, _, S, _],
        [T, 0, T, _, T, _, _, T],
    ]
    assert np.asarray(axes.images[0].get_array()).tolist() == expected
    assert "7 tokens" in axes.get_xlabel()
    size(picture)


def rounds(tree: DraftTree) -> list[Round]:
    return [
        Round(tree=tree, path=[0, 2, 5], emitted=3),
        Round(tree=tree, path=[0], emitted=1),
        Round(tree=tree, path=[0, 1, 3], emitted=1),  # cut by the end of the answer
    ]


@pytest.mark.parametrize(("origin", "starts"), [("answer", [1, 4, 5]), ("anchor", [0, 0, 0])])
def test_rounds_stand_where_they_begin(tree: DraftTree, origin: Any, starts: list[int]) -> None:
    picture = figures.rounds_figure(rounds(tree), origin=origin, trained_depth=1)
    axes = picture.figure.axes[0]
    cells: dict[tuple[int, int], tuple[float, ...]] = {}
    for bar in axes.patches:  # later bars cover earlier ones
        cells[round(bar.get_y() + bar.get_height() / 2), round(bar.get_x())] = tuple(bar.get_facecolor()[:3])
    blue, orange = figures.accepted_colour(), figures.bonus_colour()
    accepted = {key for key, colour in cells.items() if colour == pytest.approx(blue)}
    bonus = {key for key, colour in cells.items() if colour == pytest.approx(orange)}
    first, second, third = starts
    assert accepted == {(1, first), (1, first + 1), (3, third)}
    assert bonus == {(1, first + 2), (2, second)}
    assert "tau 1.67" in axes.get_title(loc="left")
    size(picture)


def test_words_are_filled_where_they_are_the_reference_s() -> None:
    rows = {"target": ["a", " b", "c"], "one": ["a", "x", "c"], "other": ["y", " b", "z"]}
    axes = figures.words_figure(rows, reference="target", title="words").figure.axes[0]
    blue = [tuple(box.get_facecolor()[:3]) == pytest.approx(figures.accepted_colour()) for box in axes.patches]
    assert blue == [False, False, False, True, False, True, False, True, False]
    assert {"␣b", "target", "draft position"} <= set(words(axes))


def test_curves_shares_and_pairs_hold_their_numbers() -> None:
    curves = {"left": {"one": np.array([3.0, 2.0]), "two": np.array([1.0, 0.5])}, "right": {"two": np.array([2.0, 2.0])}}
    picture = figures.curves_figure(curves, x="position", y="nats", title="curves")
    left, right = picture.figure.axes
    assert [line.get_ydata().tolist() for line in left.lines] == [[3.0, 2.0], [1.0, 0.5]]
    assert left.lines[1].get_color() == right.lines[0].get_color()
    assert (left.get_xlabel(), left.get_ylabel()) == ("position", "nats")
    shares = {"a": np.array([0.25, 0.5]), "b": np.array([0.75, 0.5])}
    bars = figures.shares_figure(shares, x="position", y="share", title="shares").figure.axes[0].patches
    assert [(bar.get_y(), bar.get_height()) for bar in bars] == [(0, 0.25), (0, 0.5), (0.25, 0.75), (0.5, 0.5)]
    points = np.array([[1.0, 1.0], [-2.0, 4.0]])
    axes = figures.pairs_figure({"a": points}, x="first", y="second", title="pairs").figure.axes[0]
    assert np.asarray(axes.collections[0].get_offsets()).tolist() == points.tolist()
    assert axes.get_xlim() == axes.get_ylim() and axes.get_xlim()[0] < -2 and axes.get_xlim()[1] > 4


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> report.Study:
    folder = tmp_path_factory.mktemp("figures")
    make_grid(folder, labels=("causal/none", "causal/markov"), modes=("chain",), temperatures=(1.0,), depths=(7, 23), prompts=12, seeds=1)
    return report.load_study(folder, "made")


def test_a_figure_of_a_grid_is_drawn_by_name(study: report.Study) -> None:
    assert "tau" in repr(figures.draw(study, "tau"))
    with pytest.raises(ValueError, match="did you mean 'tau'"):
        figures.draw(study, "taus")


@pytest.mark.parametrize("depth", [1, 7, 23])
def test_a_depth_gives_one_and_the_survival_up_to_it(study: report.Study, depth: int) -> None:
    right = figures.depth_figure(study, depth).figure.axes[1]
    arms = [study.arm(label, 1.0, "chain", 23) for label in ("causal/none", "causal/markov")]
    assert words(right) == [f"{1 + arm.survival[:depth].sum():.2f}" for arm in arms if arm]


@pytest.mark.parametrize("depth", [0, 24])
def test_a_depth_that_was_not_measured_is_refused(study: report.Study, depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth is {depth}; chain at temperature 1 was measured at 1 to 23"):
        figures.depth_figure(study, depth)


def test_a_slider_redraws_and_leaves_a_picture(study: report.Study) -> None:
    slider = figures.slider(lambda depth: figures.depth_figure(study, depth), range(1, 24), start=15, name="depth")
    bundle = slider._repr_mimebundle_()
    assert {"image/png", "text/plain", "application/vnd.jupyter.widget-view+json"} <= set(bundle)
    control, image = slider.widget.children
    before = bytes(image.value)
    assert before == slider.picture._repr_png_()
    control.value = 3
    assert bytes(image.value) == figures.depth_figure(study, 3)._repr_png_() != before
    with pytest.raises(ValueError, match="depth starts at 0, which is not one of"):
        figures.slider(lambda depth: slider.picture, [1, 2], start=0, name="depth")


def test_a_tree_without_a_path_is_only_drafted(tree: DraftTree) -> None:
    axes = figures.tree_figure(tree, WORDS.__getitem__).figure.axes[0]
    legend = axes.get_legend()
    assert legend is not None and [text.get_text() for text in legend.get_texts()] == ["anchor", "drafted"]
