# SPDX-License-Identifier: Apache-2.0
"""Nothing in a step waits for the device, and its launches depend on the batch's shape alone.

Kernels are noted and not run. A read of a device tensor by the host is an error: of any tensor in `gpu_step` and
`forward`, of any but the host's own copies where the metadata is built.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("vllm")

from kernel_cases import DEVICE, Batch, make_batch  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata  # noqa: E402

from bie_kernels import decode, flash_plan, launches  # noqa: E402
from bie_kernels.layout import PageLayout  # noqa: E402
from bie_kernels.torch_path import Rule  # noqa: E402
from bie_vllm_plugin import cuda_path, metadata  # noqa: E402
from bie_vllm_plugin.backend import Int4AsymBackend, WindowBackend  # noqa: E402

LAYOUT, HEADS, GROUP = PageLayout(64), 2, 2
READS = {
    "tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
    "nonzero", "equal", "allclose", "masked_select", "unique", "is_nonzero",
}  # fmt: skip


class NoReads(TorchFunctionMode):
    """Raises when the host reads a tensor: any, or one that was computed from the `watched` ones."""

    def __init__(self, watched: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.everything = watched is None
        self.kept = list(watched or [])  # alive, so that their memory is nobody else's

    def _watches(self, x: object) -> bool:
        if not isinstance(x, torch.Tensor):
            return isinstance(x, tuple | list) and any(map(self._watches, x))
        memory = x.untyped_storage().data_ptr()
        return self.everything or any(memory == y.untyped_storage().data_ptr() for y in self.kept)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        name, kwargs = func.__name__, kwargs or {}
        if name == "__get__" or not self._watches([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        reads = name in READS
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            reads = any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in index)
        elif name == "to":
            reads = any(str(x) == "cpu" for x in (*args[1:], *kwargs.values()))
        elif name == "copy_" and not self.everything:
            reads = not self._watches(args[0])
        if reads:
            raise AssertionError(f"the host reads a device tensor: {name}")
        made = func(*args, **kwargs)
        if not self.everything and isinstance(made, torch.Tensor):
            self.kept.append(made)
        return made


def _flash(q, k, v, *, out, **kwargs):  # noqa: ANN001, ANN003, ANN202
    return out, torch.zeros(q.shape[1], q.shape[0], device=DEVICE)


def _limits(drafts: int, launch_work: float) -> cuda_path.FlashLimits:
    return cuda_path.FlashLimits(_flash, 1024, 4096, 128, drafts, 4 * HEADS * GROUP * 64, launch_work)


def _builder(drafts: int, limits: cuda_path.FlashLimits, window: bool) -> metadata.Int4AsymMetadataBuilder:
    """The builder of a group as a GPU worker has it."""
    layer = SimpleNamespace(num_heads=HEADS * GROUP, num_kv_heads=HEADS, head_size_v=64)
    config = SimpleNamespace(
        speculative_config=None, parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
    )  # fmt: skip
    builder = metadata.Int4AsymMetadataBuilder(SimpleNamespace(), ["layer"], config, torch.device("cpu"))
    builder.device, builder._on_gpu, builder._window = torch.device(DEVICE), True, window
    builder.reorder_batch_threshold, builder._flash_limits = 1 + drafts, limits
    if not window:
        builder._make_plan_buffer()
    return builder


def _common(b: Batch, table: torch.Tensor, slots: torch.Tensor, prefilling: list[bool]) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=b.query_start_loc, query_start_loc_cpu=b.query_start_loc.cpu().clone(), seq_lens=b.seq_lens,
        num_reqs=len(b.q_lens), num_actual_tokens=sum(b.q_lens), max_query_len=max(b.q_lens),
        max_seq_len=int(b.seq_lens.max()), block_table_tensor=table, slot_mapping=slots,
        seq_lens_cpu_upper_bound=b.seq_lens.cpu().clone(), is_prefilling=torch.tensor(prefilling),
    )  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """(kernel, grid, constants) of every launch; none runs."""
    made: list[tuple] = []

    def launch(self, grid):  # noqa: ANN001, ANN202
        def note(*args: object, **constants: object) -> None:
            launches.specialisation(args)  # what a launch asks of its tensors
            made.append((self.kernel.__name__, grid, constants))

        return note

    monkeypatch.setattr(launches.Launches, "__getitem__", launch)
    monkeypatch.setattr(metadata, "rule_of", lambda config: Rule(8, 128, 194))
    return made


def step(lengths: list[tuple[int, int]], drafts: int, launch_work: float, prefilling: list[bool]) -> None:
    """Build, cut and run a step of one layer, launching nothing."""
    limits = _limits(drafts, launch_work)
    b = make_batch(lengths, LAYOUT, lookahead=drafts).to(DEVICE)
    q = torch.zeros(b.k.shape[0], HEADS * GROUP, 64, dtype=b.k.dtype, device=DEVICE)
    size = decode.workspace_bytes(8, HEADS * GROUP, 64, 1 + drafts, kv_heads=HEADS, device=DEVICE)
    size = max(size, flash_plan.workspace_bytes(1024, 4096, HEADS * GROUP, HEADS, LAYOUT, 2))
    workspace, out = torch.empty(size, dtype=torch.uint8, device=DEVICE), torch.empty_like(q)
    rule = Rule(b.sink_tokens, b.recent_tokens, b.retained)
    made = []
    for table, slots, window in ((b.body_table, b.body_slots, False), (b.window_table, b.window_slots, True)):
        builder, common = _builder(drafts, limits, window), _common(b, table, slots, prefilling)
        with NoReads([b.query_start_loc, b.seq_lens, table, slots]):
            made.append(builder.build(0, common))
    with NoReads():
        made[0].gpu_step(made[1])
        cuda_path.forward(
            q, b.k, b.v, b.body, b.window, *made, LAYOUT, rule, workspace, out, limits, scale=0.125, soft_cap=0.0
        )


LITTLE, MUCH = 1e-9, 1e9  # work that pays for a launch
DECODE, FUSED, FLASH = ["decode_kernel"], ["prefill_kernel"], ["gather_kernel", "combine_kernel"]


@pytest.mark.parametrize(
    ("lengths", "drafts", "work", "prefilling", "kernels"),
    [
        pytest.param([(300, 1), (129, 1)], 0, MUCH, [False, False], DECODE, id="decode"),
        pytest.param([(300, 4), (129, 4)], 3, MUCH, [False, False], DECODE, id="verify"),
        pytest.param([(300, 1), (90, 40)], 0, MUCH, [False, True], DECODE + FUSED, id="mixed"),
        pytest.param(
            [(300, 4), (129, 3), (300, 200)], 3, LITTLE, [False, False, True], DECODE + FUSED + FLASH, id="all"
        ),
        pytest.param([(0, 300), (300, 40)], 0, MUCH, [True, True], FUSED, id="prefill"),
        pytest.param([(0, 300), (300, 40)], 0, LITTLE, [True, True], FLASH, id="slices"),
    ],
)
def test_nothing_waits_for_the_device(
    lengths: list[tuple[int, int]], drafts: int, work: float, prefilling: list[bool], kernels: list[str],
    launched: list[tuple],
) -> None:  # fmt: skip
    step(lengths, drafts, work, prefilling)
    names = dict.fromkeys(name for name, *_ in launched if name != "merge_kernel")  # how often depends on the card
    assert list(names) == ["plan_kernel"] * ("decode_kernel" in kernels) + ["write_kernel"] + kernels


@pytest.mark.parametrize("q_len", [1, 4])
def test_launches_of_uniform_batches_do_not_depend_on_lengths(q_len: int, launched: list[tuple]) -> None:
    """What a CUDA graph captured holds for any lengths, padding included; the plan is made outside of it."""
    made = []
    for lengths in ([(300, q_len), (129, q_len)], [(5, q_len), (700, q_len)]):
        launched.clear()
        step(lengths, q_len - 1, MUCH, [False, False])
        made.append(launched[:])
    assert made[0] == made[1]


@pytest.mark.parametrize("backend", [Int4AsymBackend, WindowBackend])
def test_graphs_are_announced_for_uniform_batches(backend: type) -> None:
    """The group of the windows counts, too: vLLM takes the least of all groups."""
    support = backend.get_builder_cls().get_cudagraph_support(SimpleNamespace(), SimpleNamespace())
    assert support is AttentionCGSupport.UNIFORM_BATCH


READERS = {
    "tolist": lambda x: x.tolist(), "item": lambda x: x[0].item(), "int": lambda x: int(x[0]),
    "bool": lambda x: bool(x[0] > 0), "float": lambda x: float(x[0]), "index": lambda x: range(x[0]),
    "cpu": lambda x: x.cpu(), "to": lambda x: x.to("cpu"), "numpy": lambda x: x.numpy(), "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(), "equal": lambda x: torch.equal(x, x), "in": lambda x: 1 in x,
    "copy": lambda x: torch.empty(3, dtype=torch.int32).copy_(x),
}  # fmt: skip


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_reads_are_noticed(read) -> None:  # noqa: ANN001
    x, own = torch.arange(3, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    with NoReads([x]), pytest.raises(AssertionError, match="reads a device tensor"):
        read(x[:3] + own)
    with NoReads([x]):
        read(own)
    if read is not READERS["copy"]:  # between two device tensors
        with NoReads(), pytest.raises(AssertionError, match="reads a device tensor"):
            read(x)
