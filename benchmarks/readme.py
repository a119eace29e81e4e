"""The README's measured numbers as the results give them, so that a test can hold the one against the other."""

from typing import Any

from benchmarks.measuring import RESULTS
from benchmarks.page import read_results
from benchmarks.reproduction_page import declared_results
from sinkdlm.reproduce.claims import HEADS, LAMBADA, NELBO, compare, measured
from sinkdlm.reproduce.matrix import ADAPT
from sinkdlm.reproduce.statistics import over_seeds

_GPU = "nvidia-h200.json"


def expected() -> dict[str, list[str]]:
    """Result -> what the README says of it, word for word."""
    figures = {name: entry["figures"] for name, entry in read_results().items()}
    return {
        f"loss-{_GPU}": _loss(figures[f"loss-{_GPU}"]["8192x896x151936"]),
        f"attention-{_GPU}": _attention(figures[f"attention-{_GPU}"]["2x2048x10x10x128"]["relative_error"]),
        f"noise-{_GPU}": [f"{figures[f'noise-{_GPU}']['ms_corrupt']['p50']:.3f} ms"],
        f"memory-smdm-472m-{_GPU}": _memory(figures[f"memory-smdm-472m-{_GPU}"]),
        f"train-smdm-34m-sink-{_GPU}": _training(figures[f"train-smdm-34m-sink-{_GPU}"]),
        f"train-smollm2-135m-sink-{_GPU}": _adapted(figures[f"train-smollm2-135m-sink-{_GPU}"]),
        f"train_step-smdm-472m-2048-{_GPU}": _step(figures[f"train_step-smdm-472m-2048-{_GPU}"]["forms"]),
        f"train_step-smdm-472m-2048-compilers-{_GPU}": _compiled(figures[f"train_step-smdm-472m-2048-compilers-{_GPU}"]["forms"]),
        f"train_step-smdm-472m-2048-fp8-{_GPU}": _float8(figures[f"train_step-smdm-472m-2048-fp8-{_GPU}"]["forms"]),
        f"cold_start-smdm-472m-{_GPU}": _starts(figures[f"cold_start-smdm-472m-{_GPU}"]["seconds_to_first_step"]),
        f"train_step-qwen2.5-0.5b-2048-{_GPU}": _against(figures[f"train_step-qwen2.5-0.5b-2048-{_GPU}"]["forms"]),
        f"train_step-smollm2-135m-512-{_GPU}": _twins(figures[f"train_step-smollm2-135m-512-{_GPU}"]["forms"]),
        f"train_step-smollm2-135m-512-rows256-{_GPU}": _halves(figures[f"train_step-smollm2-135m-512-rows256-{_GPU}"]["forms"]),
        f"train_step-smollm2-135m-512-fp8-{_GPU}": _narrow(figures[f"train_step-smollm2-135m-512-fp8-{_GPU}"]["forms"]),
        f"sampling-{_GPU}": _sampling(figures[f"sampling-{_GPU}"]),
        f"likelihood-{_GPU}": _likelihood(figures[f"likelihood-{_GPU}"]),
        "serving-cpu-aarch64.json": _serving(figures["serving-cpu-aarch64.json"]),
        f"loader-{_GPU}": _loader(figures[f"loader-{_GPU}"]),
        "reproduction": _reproduced(),
    }


def _loss(row: Any) -> list[str]:
    forms = ("chunked", "full_logits")
    times = [f"{row['ms_forward_backward'][form]['p50']:.2f} ms" for form in forms]
    return [*times, *(f"{row['peak_bytes'][form] / 1e9:.1f} GB" for form in forms)]


def _attention(errors: Any) -> list[str]:
    said = (("append", "append"), ("merge:cudnn", "merge"), ("plain", "no sink"))
    return [f"{1000 * errors[form]['out']:.2f}e-3 ({words})" for form, words in said]


def _memory(figures: Any) -> list[str]:
    held = {name: figure["peak"] / 1e9 for name, figure in figures.items()}
    pairs = [[held[f"{how}, {place}, 1 forwards"] for place in ("alone 1", "shard 64")] for how in ("none", "full")]
    return [f"{alone:.1f} / {shard:.1f} GB" for alone, shard in pairs]


def _training(figures: Any) -> list[str]:
    rate = figures["tokens_per_second"]["p50"]
    words = f"{rate / 1e6:.2f}M" if rate >= 1e6 else f"{rate / 1e3:.0f}k"
    return [f"{words} tokens/s, {100 * figures['mfu']['p50']:.1f} % MFU"]


def _adapted(figures: Any) -> list[str]:
    """Its rates, and what the picture shows of the upper layers."""
    shares = [100 * layer["sink_share"] for layer in figures["probe"][-1]["layers"][12:]]
    minutes = sum(figures["lives_seconds"]) / 60
    budget = f"for {figures['tokens'] / 1e6:.0f}M tokens in {minutes:.0f} minutes"
    return [*_training(figures), budget, f"from layer 12 on, {min(shares):.0f} to {max(shares):.0f} % of all attention"]


def _thousands(row: Any) -> str:
    return f"{row['tokens_per_second'] / 1000:.0f}k"


def _step(forms: Any) -> list[str]:
    return [
        f"{_thousands(forms['sink'])} tokens/s, {100 * forms['sink']['mfu']:.1f} % MFU; "
        f'`residual = "bf16"` {_thousands(forms["sink-residual"])}',
        f"{_thousands(forms['official'])} tokens/s (official form)",
    ]


def _compiled(forms: Any) -> list[str]:
    ours, official = (_thousands(forms[form]) for form in ("sink", "official-compiled"))
    return [f"{official} (the same, compiled; {ours} ours in that run)"]


def _float8(forms: Any) -> list[str]:
    rates = [forms[form]["tokens_per_second"] for form in ("sink-fp8", "sink")]
    return [f'`precision = "fp8"` {_thousands(forms["sink-fp8"])}, {rates[0] / rates[1]:.2f} times bf16 in its run']


def _starts(seconds: Any) -> list[str]:
    return [f"{seconds['warm']['p50']:.1f} s, where kernels are to be built {seconds['installed']['p50']:.1f} s"]


def _against(forms: Any) -> list[str]:
    ours, official = (f"{_thousands(forms[form])} tokens/s, {forms[form]['peak_gb']:.0f} GB" for form in ("sink", "official"))
    return [f"{ours} | {official} (official form)"]


def _twins(forms: Any) -> list[str]:
    return [f"{_thousands(forms['sink'])} tokens/s; without a sink {_thousands(forms['vanilla'])}"]


def _halves(forms: Any) -> list[str]:
    """By what layers add to."""
    rates = [_thousands(forms[f"{form}{half}"]) for half in ("", "-residual") for form in ("sink", "vanilla")]
    return ['256 rows: {}; {}, and {}; {} with `residual = "bf16"`'.format(*rates)]


def _narrow(forms: Any) -> list[str]:
    rates = [_thousands(forms[f"{form}-fp8-residual"]) for form in ("sink", "vanilla")]
    return ['{}; {} with `precision = "fp8"` as well'.format(*rates)]


def _sampling(figures: Any) -> list[str]:
    def rates(form: str, *rows: int) -> str:
        return " / ".join(f"{figures[f'batch {number}'][form]['tokens_per_second']['p50']:,.0f}" for number in rows)

    ours, official = rates("ours_temperature_0.1", 64, 1), rates("official_temperature_0.1", 64, 1)
    cached = f"{rates('blocks_cache_dual', 64)} / {rates('1.1_tokens_a_step_cache_dual', 64)} tokens/s"
    origin = f"{rates('ours_origin', 64, 1)} tokens/s; float8 {rates('ours_float8_origin', 64, 1)}"
    return [
        f"{ours} tokens/s; float8 {rates('ours_float8_temperature_0.1', 64, 1)} | {official} tokens/s (official loop)",
        f"{origin} | {rates('official_origin', 64, 1)} tokens/s (official loop)",
        f"{cached} | {rates('official', 64)} tokens/s (official loop, no blocks)",
    ]


def _likelihood(figures: Any) -> list[str]:
    ours, plain = (figures[form]["requests_per_second"] for form in ("ours", "plain"))
    return [f"{ours:.1f} requests/s | {plain:.1f} requests/s (one at a time)"]


def _serving(figures: Any) -> list[str]:
    together, fixed, alone = (figures[form]["requests_per_second"]["p50"] for form in ("together", "deterministic", "one_by_one"))
    return [f"{together:.1f}; `--deterministic` {fixed:.1f} | {alone:.1f} (one by one)"]


def _reproduced() -> list[str]:
    """Of the twins of table 1, over their seeds."""
    results = declared_results(RESULTS / "reproduction")
    means = {
        (variant, name): over_seeds(measured(results, ADAPT, variant, name)).mean
        for variant in ("vanilla", "sink")
        for name in (HEADS, LAMBADA)
    }
    shares = [100 * means[variant, HEADS] for variant in ("vanilla", "sink")]
    nats = [means[variant, LAMBADA] for variant in ("vanilla", "sink")]
    change = compare(results, ADAPT, "sink", "vanilla", NELBO).spread
    equal = [
        [compare(results, ADAPT, *pair, name).spread.mean for pair in (("sink", "vanilla-sink-rate"), ("sink-dlm-rate", "vanilla"))]
        for name in (LAMBADA, NELBO)
    ]
    return [
        f"heads that rest on a token of the text go from {shares[0]:.0f} to {shares[1]:.0f} %, LAMBADA from {nats[0]:.2f} to "
        f"{nats[1]:.2f} nats a token over {change.n} seeds, and validation NELBO by {change.mean:+.4f}",
        f"at equal rates by {equal[0][0]:+.2f} and {equal[0][1]:+.2f}, and NELBO by {equal[1][0]:+.4f} and {equal[1][1]:+.4f}",
    ]


def _loader(figures: Any) -> list[str]:
    return [f"{figures['loader_tokens_per_second']['p50'] / 1e6:.0f}M tokens/s, {figures['ratio']:.0f}\N{MULTIPLICATION SIGN}"]
