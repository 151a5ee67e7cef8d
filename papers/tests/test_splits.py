"""The recorded splits of the public data sets."""

import pytest

from papers.splits import Recorded


@pytest.mark.parametrize(
    ("recorded", "sizes"),
    [
        (Recorded.BERKELEY_2010, [(100, 100)]),
        (Recorded.BERKELEY_2013, [(32, 100)]),
        (Recorded.HORSES, [(200, 127)]),
        (Recorded.BACKGROUNDS, [(572, 143)] * 5),
    ],
)
def test_recorded_splits(recorded, sizes):
    splits = recorded.read()
    assert [(len(split.train), len(split.test)) for split in splits] == sizes
    tested = [name for split in splits for name in split.test]
    assert len(set(tested)) == len(tested)
