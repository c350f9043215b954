# SPDX-License-Identifier: Apache-2.0
"""Choices per card family: data for every card, pruned by its shared memory, the measured card as it was measured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from bie_kernels import gluon_tiles, plan, tuning
from bie_kernels.layout import PageLayout

SIZES, ROWS, CPU = (64, 96, 128, 192, 256), (1, 4, 8, 9, 16, 24, 25, 48, 112, 256), torch.device("cpu")


def _forget() -> None:
    for cached in (tuning._keys_tile, tuning._prefill_tile, tuning.family, gluon_tiles.serves):
        cached.cache_clear()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch):
    """A card with so many KiB for a program: `card(kib)`."""

    def make(kib: int, chosen: tuning.Choices = tuning.MEASURED) -> None:
        monkeypatch.setitem(tuning.SHARED_MEMORY, (99, 0), kib)
        monkeypatch.setitem(tuning.CHOICES, (99, 0), chosen)
        for module in (tuning, gluon_tiles):
            monkeypatch.setattr(module, "capability", lambda device: (99, 0))
        _forget()

    yield make
    _forget()


def test_the_choices_of_every_family_fit_it() -> None:
    assert tuning.CHOICES.keys() == tuning.SHARED_MEMORY.keys()
    for known, chosen in tuning.CHOICES.items():
        program = tuning.SHARED_MEMORY[known] * 1024
        for size in SIZES:
            for rows in ROWS:
                tile = tuning.prune(chosen, tuning.SHARED_MEMORY[known], rows, size)
                assert tile is not None
                need = tuning.keys_shared(size, tile.tiles, tile.stages)
                assert need <= program and tile.per_sm * (need + 1024) <= program + 1024, (known, size, rows, tile)
                assert 1 <= tile.last <= tile.tiles <= (3 if size <= 128 else 2)
                assert 8 * (tile.tiles * (tile.programs - 1) + tile.last) >= rows > 8 * tile.tiles * (tile.programs - 1)


@pytest.mark.parametrize("known", [(9, 0), (10, 0)])
def test_nothing_is_pruned_where_it_was_measured(known: tuning.Card) -> None:
    for size in SIZES:
        for rows in ROWS:
            tile = tuning.prune(tuning.CHOICES[known], tuning.SHARED_MEMORY[known], rows, size)
            assert tile is not None and (tile.per_sm, tile.stages) == (8, 2 if size == 64 else 1)
            assert tile.programs == -(-rows // (24 if size <= 128 else 16))


@pytest.mark.parametrize("known", list(tuning.CHOICES))
def test_pieces_of_masked_pages_lie_in_one_key_group(monkeypatch: pytest.MonkeyPatch, known: tuning.Card) -> None:
    monkeypatch.setattr(tuning, "capability", lambda device: known)
    for size, group, axis in itertools.product((64, 80, 96, 112, 128, 192, 256), (32, 64), ("channel", "head_dim")):
        for rows in ROWS:
            edge = tuning.decode_tile(rows, PageLayout(size, group_size=group, key_axis=axis), CPU).edge
            assert 64 % edge == 0 and edge >= 16, (size, group, axis, rows)
            assert axis == "head_dim" or group % edge == 0, (size, group, rows)


def test_pages_go_first_then_programs_then_rows() -> None:
    """24 rows of 128 channels take 7,008 bytes, a page 9,984, 8 rows 2,336; every program 1,024 more."""
    deep = replace(tuning.MEASURED, keys_stages=3)
    cut = lambda kib: tuning.prune(deep, kib, 24, 128)
    assert cut(296) == tuning.KeysTile(1, 3, 3, 3, 8)
    assert cut(295) == cut(218) == tuning.KeysTile(1, 3, 3, 2, 8)
    assert cut(217) == tuning.KeysTile(1, 3, 3, 1, 8)
    assert cut(99) == tuning.KeysTile(1, 3, 3, 1, 5)
    assert cut(17) == tuning.KeysTile(1, 3, 3, 1, 1)
    assert cut(16) == cut(15) == tuning.KeysTile(2, 2, 1, 1, 1)
    assert cut(13) == tuning.KeysTile(3, 1, 1, 1, 1)
    assert cut(12) is None


def test_a_card_with_less_shared_memory_gets_fewer_programs(card) -> None:  # noqa: ANN001
    card(227)
    roomy = plan.item_budget(1, 1, 24, 128, CPU)
    assert roomy == 8 * tuning.INTERPRETED_SMS
    card(99)
    assert plan.item_budget(1, 1, 24, 128, CPU) == 5 * tuning.INTERPRETED_SMS
    assert tuning.keys_tile(24, 128, CPU).per_sm == 5


def test_what_does_not_fit_at_all_is_refused(card, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    """The portable kernel then serves."""
    monkeypatch.setattr(gluon_tiles, "interpreted", lambda: False)
    for kib, fits in ((13, True), (12, False)):
        card(kib)
        assert gluon_tiles.serves(SIZES, PageLayout(128), 0.0, CPU) == fits
    with pytest.raises(ValueError, match="shared memory of this card at head size 128"):
        tuning.keys_tile(24, 128, CPU)
    assert plan.item_budget(1, 1, 24, 128, CPU) == 8 * tuning.INTERPRETED_SMS


def test_prefill_takes_fewer_rows_where_shared_memory_is_short(card) -> None:  # noqa: ANN001
    """What the builds take: 192, 112 and 72 KiB with 64, 32 and 16 rows at 256 channels."""
    wide = PageLayout(256, key_axis="head_dim")
    for kib, rows in ((227, 64), (163, 32), (99, 16)):
        card(kib)
        assert tuning.prefill_tile(wide, CPU) == tuning.PrefillTile(rows, 4, 1, 2)
        assert tuning.prefill_tile(PageLayout(256), CPU).rows == 64
        assert tuning.prefill_tile(PageLayout(128, key_axis="head_dim"), CPU).rows == 64
    assert tuning.prefill_tile(PageLayout(192, key_axis="head_dim"), CPU).rows == 32
    assert tuning.prefill_tile(PageLayout(192, group_size=32, key_axis="head_dim"), CPU).rows == 16
    with pytest.raises(ValueError, match="group_size=32 needs 105 KiB .* this card has 99; use key_axis='channel'"):
        tuning.prefill_tile(PageLayout(256, group_size=32, key_axis="head_dim"), CPU)


@pytest.mark.parametrize(
    ("card", "known"),
    [((9, 0), (9, 0)), ((0, 0), (9, 0)), ((8, 7), (8, 6)), ((10, 3), (10, 0)), ((12, 1), (12, 0)), ((7, 5), (8, 6))],
)
def test_cards_without_numbers_take_those_of_the_least_roomy_relative(card: tuning.Card, known: tuning.Card) -> None:
    assert tuning.family(card) == known


def test_a_tuning_script_can_change_them() -> None:
    assert tuning.keys_tile(24, 128).tiles == 3
    try:
        tuning.use((0, 0), replace(tuning.MEASURED, keys_tiles=2, programs_per_sm=1))
        assert tuning.keys_tile(24, 128) == tuning.KeysTile(2, 2, 1, 1, 1)
        assert plan.item_budget(1, 1, 24, 128, CPU) == tuning.INTERPRETED_SMS
    finally:
        tuning.use((0, 0), tuning.MEASURED)
    assert tuning.keys_tile(24, 128).tiles == 3
