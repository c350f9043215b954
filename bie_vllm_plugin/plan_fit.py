# SPDX-License-Identifier: Apache-2.0
"""Does it fit: weights, what the engine needs besides, and the pool, against a card."""
from __future__ import annotations

from dataclasses import dataclass, field, replace

from bie_kernels.layout import SLICE_BYTES, SLICE_ROWS
from bie_vllm_plugin.config import DTYPE_NAME
from bie_vllm_plugin.plan_drafter import drafter_refusal, with_drafter
from bie_vllm_plugin.plan_formats import (
    FORMATS,
    Format,
    nominal_bytes,
    quantised,
    refusal,
    skipped_layers,
    text_only,
    token_bytes,
)
from bie_vllm_plugin.plan_layers import Layer, head_shape
from bie_vllm_plugin.plan_model import ModelShape
from bie_vllm_plugin.plan_pool import EngineOptions, Pool, build_pool, local_heads, longest_context
from bie_vllm_plugin.plan_time import CARDS, StepTime, cache_read_bytes, step_time
from bie_vllm_plugin.plan_units import MIB, PlanError, binary
from bie_vllm_plugin.plan_weights import Weights, weigh

CONTEXT_BYTES = 512 * MIB
"""CUDA context, loaded kernels and library workspaces of one process: an estimate, `--reserve` replaces it."""

NCCL_BYTES = 256 * MIB
"""Buffers of tensor parallelism, per GPU: an estimate."""

LOGIT_BYTES = 14
"""Per sampled sequence and vocabulary entry: 16-bit logits and fp32 copies of logits, probabilities and noise."""


@dataclass(frozen=True)
class Request:
    """What is asked of the planner.

    Attributes:
        vram: bytes of one card.
        utilization: share of it that vLLM may use.
        context: tokens per sequence.
        concurrency: sequences at a time.
        weights: auto, bf16, fp8 or int4.
        kv_cache_dtype: name of the planner's format that the verdict is about.
        max_seqs: sequences that a step may sample (`max_num_seqs`).
        reserve: bytes of context and libraries; None for the estimate.
        pool: bytes of the KV pool where it is given and not what is left of the card.
        bandwidth, pcie: bytes per second.
        engine: settings that decide about pages.
    """

    vram: int
    bandwidth: float
    pcie: float
    utilization: float = 0.92
    context: int = 65536
    concurrency: int = 1
    weights: str = "auto"
    kv_cache_dtype: str = DTYPE_NAME
    max_seqs: int = 16
    reserve: int | None = None
    pool: int | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True)
class FormatPlan:
    """One format's figures, on one GPU. Sizes in bytes, contexts in tokens.

    `refused` says why there are none; the other fields are then zero.
    """

    name: str
    vllm: str | None
    refused: str
    nominal_per_token: float = 0.0
    per_token: int = 0
    nominal_total: int = 0
    per_sequence: int = 0
    total: int = 0
    pool_available: int = 0
    max_context: int = 0
    max_concurrency: int = 0
    nominal_sessions: int = 0
    reported_concurrency: float = 0.0
    reported_tokens: int = 0
    block_bytes: int = 0
    blocks: int = 0
    fits: bool = False
    step: StepTime | None = None


@dataclass(frozen=True)
class Plan:
    """Everything that `bie-plan` says.

    Attributes:
        weights: of one GPU.
        context_bytes: CUDA context and libraries.
        activation: bytes of the largest step, by the chunk size.
        budget: bytes that vLLM may use of the card.
        formats: figures per format, by name.
        sentence: verdict and the cheapest change.
        changes: every single change that would make it fit, cheapest first.
        notes: further things to know.
    """

    model: ModelShape
    request: Request
    weights: Weights
    context_bytes: int
    activation: int
    budget: int
    formats: dict[str, FormatPlan]
    sentence: str
    changes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def chosen(self) -> FormatPlan:
        """The format that the verdict is about."""
        return self.formats[self.request.kv_cache_dtype]


def activation_bytes(model: ModelShape, request: Request, fmt: Format) -> int:
    """Largest transient memory of a step on one GPU: a layer of a whole chunk, or the sampler.

    vLLM measures this when it starts; here it is estimated from shapes: residual and
    normalised input, plus the widest of QKV with output and of the gated MLP.
    """
    text, tp = model.text, request.engine.tp
    hidden = int(text["hidden_size"])
    heads, kv_heads, size, v_size = head_shape(text)
    inner = text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * hidden
    inner = max(inner) if isinstance(inner, list) else int(inner)
    inner *= int(text.get("num_experts_per_tok") or 1) if text.get("moe_intermediate_size") else 1
    attention = (2 * heads * size + kv_heads * (size + v_size)) // tp
    mlp = 3 * inner // tp
    chunk = request.engine.chunk
    layer = model.itemsize * chunk * (3 * hidden + max(attention, mlp))
    sampled = min(request.max_seqs, chunk)
    sampler = sampled * int(text["vocab_size"]) * LOGIT_BYTES + model.itemsize * chunk * hidden
    # int4_asym's workspace: a slice of the body in 16 bits, and what its queries make of it.
    partial = model.itemsize * min(SLICE_ROWS, chunk) * (heads // tp) * v_size
    return max(layer, sampler) + (SLICE_BYTES + partial if fmt.name == DTYPE_NAME else 0)


def make_plan(model: ModelShape, request: Request) -> Plan:
    """Compute all formats, the verdict and what would change it.

    Raises:
        PlanError: a setting without meaning for this model.
    """
    _check(model, request)
    weights = all_weights(model, request, request.weights)
    chosen = FORMATS[request.kv_cache_dtype]
    context_bytes, budget = _context_bytes(request), int(request.vram * request.utilization)
    formats = {fmt.name: plan_format(model, fmt, request, weights) for fmt in FORMATS.values()}
    sentence, changes = _verdict(model, request, weights, formats)
    return Plan(
        model=model,
        request=request,
        weights=weights,
        context_bytes=context_bytes,
        activation=activation_bytes(model, request, chosen),
        budget=budget,
        formats=formats,
        sentence=sentence,
        changes=changes,
        notes=_notes(model, request, formats),
    )


def all_weights(model: ModelShape, request: Request, choice: str) -> Weights:
    """Weights of one GPU, a drafter's included."""
    tp = request.engine.tp
    return with_drafter(weigh(model, choice, tp), request.engine.drafter, model, choice, tp)


def _check(model: ModelShape, request: Request) -> None:
    heads, kv_heads, *_ = head_shape(model.text)
    tp = request.engine.tp
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        raise PlanError(
            f"--tensor-parallel {tp} does not divide the model's {heads} query heads and {kv_heads} KV heads; "
            "choose a divisor."
        )
    count = int(model.text["num_hidden_layers"])
    wrong = sorted(index for index in request.engine.skip if index >= count)
    if wrong:
        raise PlanError(f"--skip-layers {wrong[0]} is not a layer of {model.name}; its layers are 0 to {count - 1}.")


def _context_bytes(request: Request) -> int:
    if request.reserve is not None:
        return request.reserve
    if request.engine.cpu:
        return 0
    return CONTEXT_BYTES + (NCCL_BYTES if request.engine.tp > 1 else 0)


def plan_format(model: ModelShape, fmt: Format, request: Request, weights: Weights) -> FormatPlan:
    """One format's figures on one GPU."""
    engine = request.engine
    if reason := refusal(model, fmt, engine.settings) or drafter_refusal(engine.drafter, model, fmt):
        return FormatPlan(fmt.name, fmt.vllm, reason)
    context, concurrency = request.context, request.concurrency
    pool = build_pool(model, fmt, engine, context)
    skipped = skipped_layers(model, fmt, engine.skip)
    growing = [(layer, own) for layer, own in _caches(model, fmt, engine) if layer.kind in ("full", "mla")]
    per_token = sum(
        token_bytes(layer, own, model.itemsize, engine.settings, skipped) * local_heads(layer, engine.tp)
        for layer, own in growing
    )
    nominal = sum(
        nominal_bytes(layer, own, model.itemsize, engine.settings) * local_heads(layer, engine.tp)
        for layer, own in growing
    )
    left = request.pool
    if left is None:
        used = weights.total + _context_bytes(request) + activation_bytes(model, request, fmt)
        left = max(0, int(request.vram * request.utilization) - used)
    return FormatPlan(
        name=fmt.name,
        vllm=fmt.vllm,
        refused="",
        nominal_per_token=nominal,
        per_token=per_token,
        nominal_total=round(nominal * context * concurrency),
        per_sequence=pool.sequence_bytes(context),
        total=pool.sequence_bytes(context) * concurrency,
        pool_available=left,
        max_context=longest_context(model, fmt, engine, left, concurrency),
        max_concurrency=pool.max_sequences(left, context),
        nominal_sessions=int(left // (nominal * context)) if nominal else 0,
        reported_concurrency=pool.reported_concurrency(left, context),
        reported_tokens=pool.reported_tokens(left, context),
        block_bytes=pool.block_bytes,
        blocks=pool.blocks(left),
        fits=pool.pool_bytes(context, concurrency) <= left,
        step=_step(model, fmt, request, weights),
    )


def _caches(model: ModelShape, fmt: Format, engine: EngineOptions) -> list[tuple[Layer, Format]]:
    """Every layer's cache with its format, a drafter's included."""
    drafter = engine.drafter
    drafted = [(layer, drafter.format_beside(fmt)) for layer in drafter.layers] if drafter else []
    return [(layer, fmt) for layer in model.layers] + drafted


def needed_bytes(model: ModelShape, fmt: Format, request: Request, weights: Weights) -> int:
    """All that one GPU must hold for the request."""
    pool = _pool_bytes(model, fmt, request)
    return weights.total + _context_bytes(request) + activation_bytes(model, request, fmt) + pool


def _pool_bytes(model: ModelShape, fmt: Format, request: Request) -> int:
    return build_pool(model, fmt, request.engine, request.context).pool_bytes(request.context, request.concurrency)


def _step(model: ModelShape, fmt: Format, request: Request, weights: Weights, spilled: int = 0) -> StepTime:
    skipped = skipped_layers(model, fmt, request.engine.skip)
    sizes = []
    for number, (layer, own) in enumerate(_caches(model, fmt, request.engine)):
        passes = 1 if number < len(model.layers) else request.engine.drafts  # a drafter reads its cache for each draft
        if layer.kind == "state":
            assert layer.state is not None
            sizes.append((layer, layer.state.page_bytes(request.engine.tp)))
        else:
            size = token_bytes(layer, own, model.itemsize, request.engine.settings, skipped)
            sizes.append((layer, passes * size * local_heads(layer, request.engine.tp)))
    cache = cache_read_bytes(sizes, request.context)
    if fmt.name == DTYPE_NAME:  # the window is read in 16 bits besides
        settings = request.engine.settings
        window = min(request.context, settings.recent_tokens + settings.sink_tokens)
        cache += sum(
            window * model.itemsize * (layer.head_size + layer.head_size_v) * local_heads(layer, request.engine.tp)
            for layer in model.layers
            if quantised(layer, fmt, skipped)
        )
    return step_time(weights.per_step, cache, request.concurrency, request.bandwidth, spilled, request.pcie)


def spilled_step(plan: Plan, spilled: int) -> StepTime:
    """Ceiling of the chosen format when so many bytes are read over PCIe each step."""
    fmt = FORMATS[plan.request.kv_cache_dtype]
    return _step(plan.model, fmt, plan.request, plan.weights, spilled)


# -- verdict ------------------------------------------------------------------------------
CHUNKS = (1024, 512, 256)
MIN_CONTEXT = 1024
FALLBACKS = ("fp8", DTYPE_NAME, "int4_per_token_head")
"""Formats proposed instead, the gentlest first."""


def _verdict(
    model: ModelShape, request: Request, weights: Weights, formats: dict[str, FormatPlan]
) -> tuple[str, tuple[str, ...]]:
    fmt = FORMATS[request.kv_cache_dtype]
    plan = formats[fmt.name]
    what = f"{request.context:,} tokens" + (f" x {request.concurrency} sequences" if request.concurrency > 1 else "")
    where = f"a pool of {binary(request.pool)}" if request.pool else f"{binary(request.vram)}"
    if request.engine.tp > 1 and not request.pool:
        where = f"{request.engine.tp} x {where}"
    if plan.refused:
        other = next((name for name in FALLBACKS if name != fmt.name and formats[name].fits), None)
        change = (f"--kv-cache-dtype {other}",) if other else ()
        return f"Does not fit: {plan.refused}{'; use ' + change[0] if change else ''}.", change
    if plan.fits:
        free = plan.pool_available - _pool_bytes(model, fmt, request)
        return f"Fits: {what} with {fmt.name} in {where}, {binary(free)} to spare.", ()
    changes = tuple(_changes(model, request, weights, formats))
    if request.pool:
        needed = _pool_bytes(model, fmt, request)
        limit = binary(request.pool)
    else:
        needed = needed_bytes(model, fmt, request, weights)
        limit = f"{binary(request.vram * request.utilization)} usable of {where}"
    tail = f"; the cheapest change that would fit: {changes[0]}" if changes else "; no single change would fit"
    return f"Does not fit: {what} with {fmt.name} need {binary(needed)} and there are {limit}{tail}.", changes


def _changes(
    model: ModelShape, request: Request, weights: Weights, formats: dict[str, FormatPlan]
) -> list[str]:
    """Single changes that make it fit: chunk size, format, context, weights, card."""
    fmt = FORMATS[request.kv_cache_dtype]
    found = []
    for chunk in CHUNKS:
        smaller = replace(request, engine=replace(request.engine, chunk=chunk))
        if chunk < request.engine.chunk and plan_format(model, fmt, smaller, weights).fits:
            found.append(f"--chunked-prefill-size {chunk}")
            break
    mine = formats[fmt.name]
    found += [
        f"--kv-cache-dtype {name}"
        for name in FALLBACKS
        if name != fmt.name and formats[name].fits and formats[name].per_token < mine.per_token
    ][:1]
    most = mine.max_context // 64 * 64
    shorter = [f"--context {most} (the most that fits)"] if most >= MIN_CONTEXT else []
    if most * 4 >= request.context:  # giving up more than that is no longer cheap
        found += shorter
        shorter = []
    if request.concurrency > 1 and mine.max_concurrency:
        found.append(f"--concurrency {mine.max_concurrency}")
    if request.pool is None:
        for choice in ("fp8", "int4"):
            lighter = all_weights(model, request, choice)
            if lighter.total < weights.total and plan_format(model, fmt, request, lighter).fits:
                found.append(f"--weights {choice} (a checkpoint in {choice})")
                break
        for card in CARDS.values():
            larger = replace(request, vram=card.memory)
            if card.memory > request.vram and plan_format(model, fmt, larger, weights).fits:
                found.append(f"a card with {binary(card.memory)}, e.g. {card.name}")
                break
    return found + shorter


def _notes(model: ModelShape, request: Request, formats: dict[str, FormatPlan]) -> tuple[str, ...]:
    notes = []
    if model.max_context and request.context > model.max_context:
        notes.append(
            f"{model.name} was made for {model.max_context:,} tokens: vLLM refuses --max-model-len "
            f"{request.context} unless the config scales its RoPE or VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set."
        )
    kept = [layer for layer in model.layers if layer.kind in ("sliding", "chunked")]
    chosen = formats[request.kv_cache_dtype]
    if kept and request.kv_cache_dtype == DTYPE_NAME and not chosen.refused:
        notes.append(
            f"{len(kept)} of {len(model.layers)} layers slide over {kept[0].window:,} tokens and keep 16 bits; "
            "the rest grow with the context."
        )
    if text_only(model, FORMATS[request.kv_cache_dtype]):
        notes.append(f"{DTYPE_NAME} serves {model.name} as a language model only: add --language-model-only.")
    if request.engine.drafter:
        notes.append(
            f"A step with {request.engine.drafts} drafts yields 1 to {request.engine.drafts + 1} tokens per sequence; "
            "rates count one."
        )
    keeps = FORMATS[request.kv_cache_dtype].keeps
    if keeps:
        notes.append(f"vLLM keeps the first and last {keeps} layers in 16 bits with {request.kv_cache_dtype}.")
    if FORMATS[request.kv_cache_dtype].vllm is None:
        notes.append(f"vLLM 0.32 has no {request.kv_cache_dtype} cache: its figures are the format's own.")
    return tuple(notes)


def pool_of(plan: Plan) -> Pool:
    """The chosen format's pool."""
    return build_pool(plan.model, FORMATS[plan.request.kv_cache_dtype], plan.request.engine, plan.request.context)
