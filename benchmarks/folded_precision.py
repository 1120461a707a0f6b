"""Error of one folded batch normalization against float64, by the mean of its input: output and gradients.

    python benchmarks/folded_precision.py

The input has a mean of 0 to 300 standard deviations, equal in all channels, and the kernel is orthogonal to it: the mean of the
result is small, but the mean of the input enters the products. Three forms: separate; folded without a center, as in a
downsampling shortcut; folded around a center, as behind the ReLU of a bottleneck block. With biases of 20 or -20 no result is
near the kink of the ReLU; with normal ones of standard deviation 0.3 many are, and rounding opens or closes some. Their errors
are means of four draws. Writes benchmarks/results/folded_precision.json.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from common import arguments, markdown, write
from jax import lax

from jaxdp.bench.environment import provenance
from jaxdp.models.batch_norm import EPSILON, BatchNormTerm, Fusion, Normalization, moments
from jaxdp.models.bn_relu import fused_bn_relu
from jaxdp.models.folded_batch_norm import FoldedTerm, InputMoments, Projection

BATCH, SIDE, INPUTS, OUTPUTS = 64, 8, 64, 256
AWAY, NEAR = "±20", "N(0, 0.3)"
CASES = {AWAY: ((0.0, 3.0, 30.0, 300.0), 1), NEAR: ((0.5, 3.0, 30.0), 4)}  # bias: means, draws
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
FORMS = "separate", "folded, no center", "folded, center"
QUANTITIES = "output", "h", "kernel", "scale"


def normalized(h, kernel, scale, bias):
    """ReLU of the normalized product in the dtype of the arguments, differentiated by JAX."""
    x = h @ kernel
    deviation = x - x.mean((0, 1, 2))
    return jnp.maximum(deviation / jnp.sqrt((deviation**2).mean((0, 1, 2)) + EPSILON) * scale + bias, 0)


def jaxdps(h, kernel, scale, bias, *, form: str, center: float):
    """The same by jaxdp; with a center, h lacks it."""
    if form == "separate":
        x = h @ kernel.astype(h.dtype)
        mean, square = moments(lax.stop_gradient(x))
        term = BatchNormTerm(x, Normalization(scale, bias, mean, jnp.maximum(square - mean * mean, 0.0)))
    else:
        centers = jnp.full(INPUTS, center) if form == "folded, center" else None
        projection = Projection(h, kernel, centers)
        inputs = InputMoments.of(lax.stop_gradient(h))
        mean, square = inputs.projected(lax.stop_gradient(projection.rounded_kernel))
        term = FoldedTerm(projection, inputs, Normalization(scale, bias, mean, jnp.maximum(square - mean * mean, 0.0)))
    return fused_bn_relu(Fusion((), "direct"), (term,))


@partial(jax.jit, static_argnums=0)
def output_and_gradient(function, arguments, cotangent):
    output, vjp_fn = jax.vjp(function, *arguments)
    return output, vjp_fn(cotangent)


def measured(form: str, dtype_name: str, *, mean: float, bias_kind: str) -> dict:
    draws = [errors(form, DTYPES[dtype_name], mean=mean, bias_kind=bias_kind, seed=seed) for seed in range(CASES[bias_kind][1])]
    row = {"form": form, "dtype": dtype_name, "mean": mean, "bias": bias_kind}
    return row | {name: float(np.mean([draw[name] for draw in draws])) for name in QUANTITIES}


def errors(form: str, dtype: jax.typing.DTypeLike, *, mean: float, bias_kind: str, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)

    def rounded(values):
        return np.asarray(jnp.asarray(values, dtype), np.float64)

    deviation = rng.normal(size=(BATCH, SIDE, SIDE, INPUTS))
    h = rounded(deviation if form == "folded, center" else mean + deviation)
    kernel = rng.normal(size=(INPUTS, OUTPUTS))
    kernel = rounded(kernel - kernel.mean(0))
    scale, sign = rng.uniform(0.5, 2, OUTPUTS), np.where(rng.random(OUTPUTS) < 0.5, 1.0, -1.0)
    bias = 20.0 * sign if bias_kind == AWAY else 0.3 * rng.normal(size=OUTPUTS)
    x = h @ kernel
    cotangent = rounded(rng.normal(size=x.shape) + (x - x.mean((0, 1, 2))) / x.std((0, 1, 2)))
    with jax.enable_x64():
        arguments = tuple(jnp.asarray(one, jnp.float64) for one in (h, kernel, scale, bias))
        expected, wanted = jax.tree.map(np.asarray, output_and_gradient(normalized, arguments, jnp.asarray(cotangent)))
    arguments = jnp.asarray(h, dtype), *(jnp.asarray(one, jnp.float32) for one in (kernel, scale, bias))
    function = partial(jaxdps, form=form, center=mean)
    found, gradient = output_and_gradient(function, arguments, jnp.asarray(cotangent, dtype))
    pairs = dict(zip(QUANTITIES, [(found, expected), *zip(gradient, wanted, strict=True)], strict=False))

    def error(one, other) -> float:
        return float(np.linalg.norm(np.asarray(one, np.float64) - other) / np.linalg.norm(other))

    return {name: error(*pair) for name, pair in pairs.items()}


def table(record: dict) -> str:
    rows = []
    for row in record["results"]:
        if row["dtype"] in DTYPES and row["mean"] and (row["dtype"], row["bias"]) != ("float32", NEAR):
            errors = (f"{row[name]:.1e}" for name in QUANTITIES)
            rows.append((row["dtype"], row["bias"], f"{row['mean']:g}", row["form"], *errors))
    columns = "activations", "bias", "mean", "form", "output", "gradient of h", "of the kernel", "of the scale"
    return markdown(columns, rows)


def main():
    arguments(__doc__)
    rows = [
        measured(form, dtype, mean=mean, bias_kind=bias_kind)
        for dtype in DTYPES
        for bias_kind, (means, _) in CASES.items()
        for mean in means
        for form in FORMS
    ]
    write("folded_precision", {"provenance": provenance(), "results": rows}, table)


if __name__ == "__main__":
    main()
