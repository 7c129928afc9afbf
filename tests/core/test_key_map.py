"""The map from keys to rows behaves as a dict, whatever the keys; first values depend on key and seed alone."""

import numpy as np
import pytest

from stratagem._core.key_index import COUNT, PROTECTED, KeyIndex, KeyRule
from stratagem._core.key_map import KeyMap, hash_keys, initial_rows


def keys_of(*values):
    return np.array(values, np.int64)


@pytest.mark.parametrize("seed", range(5))
def test_map_is_a_dict(seed):
    """Insertions, deletions and lookups in random order, with keys that collide."""
    random = np.random.default_rng(seed)
    pool = np.unique(
        np.concatenate([random.integers(-(2**63), 2**63, 3000), np.arange(-50, 50) << 40])
    )
    known, expected = KeyMap(), {}
    for turn in range(40):
        some = random.choice(pool, 300, replace=False)
        if turn % 4 == 3:
            gone = np.array([one for one in some.tolist() if one in expected], np.int64)
            known.delete(gone)
            for one in gone.tolist():
                del expected[one]
        else:
            new = np.array([one for one in some.tolist() if one not in expected], np.int64)
            numbers = random.integers(0, 1 << 40, new.size)
            known.insert(new, numbers)
            expected.update(zip(new.tolist(), numbers.tolist(), strict=True))
        assert known.find(pool).tolist() == [expected.get(one, -1) for one in pool.tolist()]
        assert len(known) == len(expected)


def test_hashes_are_the_same_in_every_process():
    """Checkpoints and servers rely on these numbers."""
    assert hash_keys(keys_of(0, 1, -1)).tolist() == [
        7905728728188956330,
        6685036501382267578,
        15281903241861080173,
    ]


def test_first_values_have_the_distribution_asked():
    keys = np.arange(20_000)
    normal = initial_rows(keys, 8, seed=3, kind="normal", scale=2.0)
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 2.0) < 0.05
    uniform = initial_rows(keys, 8, seed=3, kind="uniform", scale=0.5)
    assert -0.5 <= uniform.min() < -0.49
    assert 0.49 < uniform.max() <= 0.5
    assert not initial_rows(keys, 8, seed=3, kind="zeros", scale=0.5).any()
    again = initial_rows(keys[7:9], 8, seed=3, kind="normal", scale=2.0)
    assert np.array_equal(again, normal[7:9])
    assert not np.array_equal(
        initial_rows(keys[:9], 8, seed=4, kind="normal", scale=2.0), normal[:9]
    )


def index_of(**settings):
    rule = KeyRule(**{"width": 2, "max_rows": 100, "seed": 1, **settings})
    return KeyIndex(rule, np.zeros((rule.rows, 3), np.int64)), rule


def test_rows_of_a_key_do_not_depend_on_how_buckets_are_shared():
    whole, rule = index_of(max_rows=2000)
    keys = np.random.default_rng(0).integers(-(2**60), 2**60, 1500)
    expected = whole.resolve(keys, create=True).rows
    cut = rule.buckets // 3 * rule.bucket_rows
    array = np.zeros((rule.rows, 3), np.int64)
    first = KeyIndex(rule, array[:cut])
    second = KeyIndex(rule, array[cut:], rule.buckets // 3)
    in_first = rule.bucket_of(keys) < rule.buckets // 3
    assert np.array_equal(first.resolve(keys[in_first], create=True).rows, expected[in_first])
    found = second.resolve(keys[~in_first], create=True).rows + cut
    assert np.array_equal(found, expected[~in_first])
    assert np.array_equal(KeyIndex(rule, array).find(keys), expected)


def test_max_rows_keys_fit():
    index, rule = index_of(max_rows=20_000)
    index.resolve(np.arange(20_000) * 977, create=True)
    assert len(index) == 20_000
    assert rule.rows < 1.5 * 20_000


def test_a_full_table_raises_and_changes_nothing():
    index, _ = index_of(max_rows=10)
    index.resolve(np.arange(10), create=True)
    with pytest.raises(MemoryError, match=r"made for 10 rows.*evict"):
        index.resolve(keys_of(99), create=True)
    assert index.find(keys_of(99)) == -1
    assert len(index) == 10


def test_keys_are_admitted_when_seen_often_enough():
    index, _ = index_of(admit_after=3)
    assert index.resolve(keys_of(5), create=True).rows == -1
    assert index.resolve(keys_of(5), create=False).rows == -1
    assert index.resolve(keys_of(5), create=True).rows == -1
    assert index.resolve(keys_of(5), create=True).rows == 0
    assert index.resolve(keys_of(6), create=True, counts=keys_of(3)).rows == 1


def test_keys_are_admitted_with_a_probability():
    index, _ = index_of(max_rows=10_000, admit_probability=0.25)
    keys = np.arange(4000)
    sizes = []
    for _ in range(3):
        index.resolve(keys, create=True)
        sizes.append(len(index) / keys.size)
    assert sizes == pytest.approx([1 - 0.75**n for n in (1, 2, 3)], abs=0.03)


@pytest.mark.parametrize(("evict", "gone"), [("age", 0), ("count", 1)])
def test_a_full_table_evicts_the_oldest_or_the_least_used(evict, gone):
    index, _ = index_of(max_rows=3, evict=evict)
    index.resolve(keys_of(0), create=True, counts=keys_of(9))
    index.resolve(keys_of(1), create=True, counts=keys_of(1))
    index.resolve(keys_of(2), create=True, counts=keys_of(9))
    for _ in range(PROTECTED + 1):
        index.resolve(keys_of(), create=True)
    found = index.resolve(keys_of(7), create=True)
    assert found.again.tolist() == found.rows.tolist()
    assert [one for one in range(3) if index.find(keys_of(one)) < 0] == [gone]


def test_rows_in_recent_use_are_not_evicted():
    index, _ = index_of(max_rows=3, evict="age")
    index.resolve(np.arange(3), create=True)
    with pytest.raises(MemoryError, match="last 64 lookups"):
        index.resolve(keys_of(7), create=True)


def test_old_rows_leave_and_come_back_anew():
    index, _ = index_of(max_age=80)
    index.resolve(keys_of(1, 2), create=True)
    for _ in range(120):
        index.resolve(keys_of(2), create=True)
    assert index.find(keys_of(1, 2)).tolist() == [-1, 1]
    assert index.resolve(keys_of(3), create=True).again.tolist() == [0]


def test_gradients_of_rows_with_a_new_key_are_recognised():
    index, _ = index_of(max_rows=1, evict="age")
    before = index.resolve(keys_of(1), create=True).rows
    clock = index.now
    assert index.is_older(before, clock).tolist() == [True]
    for _ in range(PROTECTED + 1):
        index.resolve(keys_of(), create=True)
    assert index.resolve(keys_of(2), create=True).rows.tolist() == before.tolist()
    assert index.is_older(before, clock).tolist() == [False]


def test_an_index_is_read_again_from_its_array():
    index, rule = index_of(max_age=80)
    index.resolve(keys_of(1, 2, 3), create=True)
    for _ in range(120):
        index.resolve(keys_of(2), create=True)
    array = index._keys.copy()
    again = KeyIndex(rule, array)
    assert len(again) == len(index) == 1
    assert again.now == index.now
    assert again.taken().tolist() == index.taken().tolist()
    assert again.resolve(keys_of(9), create=True).again.size == 1
    assert int((array[:, COUNT] > 0).sum()) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"evict": "age"},
        {"evict": "count", "admit_probability": 0.3},
        {"evict": "age", "max_age": 80, "admit_after": 3},
    ],
)
def test_a_copy_goes_on_as_the_original(settings):
    """A backup is a copy of keys and record: it gives the same rows to the same keys, and removes the same ones."""
    random = np.random.default_rng(1)
    rule = KeyRule(width=2, max_rows=600 if settings else 3000, seed=1, **settings)
    keys = np.zeros((rule.rows, 3), np.int64)

    def look_up(*indices):
        some, counts = np.unique(random.zipf(1.2, 20) % 2000, return_counts=True)
        return [one.resolve(some, create=True, counts=counts) for one in indices]

    index = KeyIndex(rule, keys)
    for _ in range(300):
        look_up(index)
    copied = keys.copy()
    copy = KeyIndex(rule, copied)
    copy.restore(index.record())
    rows = np.arange(len(keys))
    for _ in range(300):
        one, other = look_up(index, copy)
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        assert np.array_equal(keys, copied)
        assert index.now == copy.now
        assert np.array_equal(
            index.is_older(rows, index.now - 9), copy.is_older(rows, copy.now - 9)
        )
