"""The small picture of a launch, line by line."""

from iosim.report.sketch import legend, picture
from iosim.study.visits import ADDED, BOTH, READ, WRITTEN, Calendar, Strip


def strip(name, tiles, marks):
    return Strip(operand=name, tiles=tiles, marks=marks)


def test_blocks_stand_side_by_side():
    found = Calendar(
        launch="loop",
        blocks=3,
        steps=(2, 2),
        strips=(
            strip("K", 2, {(0, 0): READ, (1, 1): READ, (0, 2): READ, (1, 3): READ}),
            strip("O", 3, {(0, 1): WRITTEN, (1, 3): BOTH}),
        ),
    )
    assert picture(found) == [
        "loop, blocks 0 to 1 of 3",
        "     0 │1",
        "K  0 █ │█",
        "   1  █│ █",
        "O  0  ░│",
        "   1   │ ▓",
        "   ⋮",
    ]
    assert legend([found]) == "█ read, ░ written, ▓ read and written"


def test_blocks_of_one_step_need_no_bars_and_many_tiles_share_lines():
    marks = {(tile, tile): ADDED for tile in range(12)}
    found = Calendar(launch="many", blocks=12, steps=(1,) * 12, strips=(strip("dQ", 12, marks),))
    lines = picture(found)
    assert lines[0] == "many, all blocks"
    assert lines[1] == "      012345678901"
    assert lines[2:] == [f"{'dQ' if t == 0 else '  '} {t:>2} {' ' * t}++" for t in range(0, 12, 2)]


def test_the_sign_that_says_more_wins_where_tiles_share_a_line():
    marks = {(tile, 0): READ for tile in range(16)} | {(1, 0): WRITTEN}
    found = Calendar(launch="one", blocks=1, steps=(1,), strips=(strip("x", 16, marks),))
    assert picture(found)[2].endswith("░")
    assert picture(found)[3].endswith("█")
