# SPDX-License-Identifier: Apache-2.0
"""The layout alone: every byte has one owner, and the order is the one that the kernels rely on."""
from __future__ import annotations

import subprocess
import sys

import pytest

from bie_kernels.layout import GROUP_SIZES, HEAD_SIZES, PAGE_TOKENS, PageLayout, WindowLayout, token_slot

LAYOUTS = [
    PageLayout(size, None, group, axis)
    for size in HEAD_SIZES
    for group in GROUP_SIZES
    for axis in ("channel", "head_dim")
] + [PageLayout(192, 128), PageLayout(64, 112, 32, "head_dim")]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_nibble_and_metadata_byte_has_one_owner(layout):
    nibbles, halves = set(), set()
    for token in range(PAGE_TOKENS):
        for channel in range(layout.head_size):
            nibbles.add(layout.k_code_byte(token, channel))
            halves |= {layout.k_meta_byte(base, token, channel) for base in (layout.k_scale, layout.k_origin)}
        for channel in range(layout.v_size):
            nibbles.add(layout.v_code_byte(token, channel))
            halves |= {layout.v_meta_byte(base, token, channel) for base in (layout.v_scale, layout.v_min)}
    assert nibbles == {(byte, shift) for byte in range(layout.k_scale) for shift in (0, 4)}
    assert halves == set(range(layout.k_scale, layout.page_bytes, 2))
    assert layout.page_bytes % 16 == 0 and layout.v_codes % 16 == 0 and layout.k_scale % 16 == 0
    assert layout.token_bytes * PAGE_TOKENS == layout.page_bytes


@pytest.mark.parametrize("layout", LAYOUTS[::3], ids=str)
def test_a_byte_never_holds_two_tokens(layout):
    owner = {}
    for token in range(PAGE_TOKENS):
        for channel in range(layout.v_size):
            assert owner.setdefault(layout.v_code_byte(token, channel)[0], token) == token
        for channel in range(layout.head_size):
            assert owner.setdefault(layout.k_code_byte(token, channel)[0], token) == token


def test_order_of_the_matrix_units():
    """Eight channels a 32-bit word, even ones in the low half; V's 16-byte runs hold eight tokens' neighbours."""
    layout = PageLayout(128)
    word = {layout.k_code_byte(3, channel): channel for channel in range(8, 16)}
    start = 3 * 64 + 4
    assert [word[start + byte, shift] for byte in range(4) for shift in (0, 4)] == [8, 10, 12, 14, 9, 11, 13, 15]
    assert layout.v_code_byte(0, 8) == (layout.v_codes, 4)
    assert layout.v_code_byte(8, 0) == (layout.v_codes + 1, 0)
    assert layout.v_code_byte(1, 0) == (layout.v_codes + 2, 0)
    assert layout.v_code_byte(16, 0) == (layout.v_codes + 4, 0)
    assert layout.v_code_byte(2, 0) == (layout.v_codes + 16, 0)
    assert layout.v_code_byte(0, 16) == (layout.v_codes + 512, 0)
    assert sorted(map(token_slot, range(PAGE_TOKENS))) == list(range(PAGE_TOKENS))


def test_sizes_that_are_promised():
    assert PageLayout(128).page_bytes == 9216 and PageLayout(128).token_bytes == 144
    assert PageLayout(128).bits_per_element == 4.5 and PageLayout(128, None, 32).bits_per_element == 5.0
    # 32 layers of 8 KV heads: 36 KiB a token.
    assert PageLayout(128).token_bytes * 8 * 32 == 36 * 1024
    # A shorter last group costs metadata: D = 80 takes two value groups.
    assert PageLayout(80).bits_per_element == pytest.approx(4.65)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_window_page_is_never_larger_than_a_body_page(layout, itemsize):
    assert WindowLayout(layout.head_size, layout.v_size, itemsize).page_bytes <= layout.page_bytes


@pytest.mark.parametrize(
    "arguments", [(100,), (8,), (272,), (64, 100), (64, 64, 48), (64, 64, 64, "token")], ids=str
)
def test_what_has_no_layout_is_refused(arguments):
    with pytest.raises(ValueError, match="int4_asym"):
        PageLayout(*arguments)


def test_imports_neither_torch_nor_numpy():
    code = "import sys, bie_kernels.layout; print('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
