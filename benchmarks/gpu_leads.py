"""Alternative forms of the training step, each compiled for a GPU and compared with the current step.

    python benchmarks/gpu_leads.py [--leads NAME ...]     (needs the extra cuda13, no GPU)

Compilation gives the number of kernels and their bytes (see gpu_bytes.py). A form with the same number of both can only gain by
faster kernels, which needs a GPU to measure. The forms are patches in this script, not part of jaxdp. Replaces the rows of the
given names in benchmarks/results/gpu_leads.json and prints them.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import flax.linen as nn
import gpu_bytes
import jax
import jax.numpy as jnp
from jax import lax

from jaxdp.models import batch_norm, bn_relu, convolution, folded_batch_norm, resnet

RESULT = gpu_bytes.ROOT / "benchmarks/results/gpu_leads.json"


def stem_space_to_depth():
    """The 7x7 convolution with stride 2 of 3 channels as one of 4x4 without stride of 12, padded to 16."""
    plain = resnet.convolve

    def convolve(images, kernel, stride=1, *, method="direct"):
        if kernel.shape[0] != 7:
            return plain(images, kernel, stride, method=method)
        batch, height, width, channels = images.shape
        cells = images.reshape(batch, height // 2, 2, width // 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
        cells = cells.reshape(batch, height // 2, width // 2, 4 * channels)
        taps = jnp.pad(kernel, ((1, 0), (1, 0), (0, 0), (0, 0))).reshape(4, 2, 4, 2, channels, -1).transpose(0, 2, 1, 3, 4, 5)
        taps = taps.reshape(4, 4, 4 * channels, -1)
        cells, taps = jnp.pad(cells, ((0, 0),) * 3 + ((0, 4),)), jnp.pad(taps, ((0, 0),) * 2 + ((0, 4), (0, 0)))
        return lax.conv_general_dilated(cells, taps, (1, 1), [(2, 1), (2, 1)], dimension_numbers=convolution.DIMENSIONS)

    resnet.convolve = convolve


def input_gradient_kernel():
    """The gradient of a block's input by one Pallas kernel: 1x1 convolution, shortcut, ReLU mask, and sum for the block before.

    Pallas's Triton backend, which JAX 0.11 deprecates. For the 12 blocks behind another of the same stage, folded form. The
    sums go from the gradient of one block to that of the block before through a list, while JAX traces the step.
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    sums, tile = [], 64

    def gradient(cotangent, kernel, shortcut_cotangent, x):
        (rows, inner), outer = cotangent.shape, kernel.shape[0]

        def body(cotangent, kernel, shortcut_cotangent, x, masked, total):
            product = jnp.zeros((tile, tile), jnp.float32)
            for k in range(0, inner, tile):
                part = slice(k, k + tile)
                product += triton.dot(cotangent[:, part], kernel[:, part], trans_b=True)
            product += shortcut_cotangent[...].astype(jnp.float32)
            masked[...] = jnp.where(x[...] > 0, product, 0).astype(masked.dtype)
            total[...] = masked[...].astype(jnp.float32).sum(0, keepdims=True)

        square = pallas.BlockSpec((tile, tile), lambda i, j: (i, j))
        row, column = pallas.BlockSpec((tile, inner), lambda i, j: (i, 0)), pallas.BlockSpec((tile, inner), lambda i, j: (j, 0))
        masked, total = pallas.pallas_call(
            body,
            grid=(rows // tile, outer // tile),
            in_specs=[row, column, square, square],
            out_specs=[square, pallas.BlockSpec((1, tile), lambda i, j: (i, j))],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((rows // tile, outer), jnp.float32)],
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
            interpret=INTERPRET,
        )(cotangent, kernel, shortcut_cotangent, x)
        return masked, total.sum(0)

    @jax.custom_vjp
    def convolve_and_pass_on(x, kernel):
        return convolution.convolve(x, kernel), x

    def backward(residuals, cotangents):
        x, kernel = residuals
        rows = [each.reshape(-1, each.shape[-1]) for each in (*cotangents, x)]
        masked, total = gradient(rows[0], kernel[0, 0], *rows[1:])
        sums.append(total)
        kernel_gradient = jax.vjp(lambda kernel: convolution.convolve(x, kernel), kernel)[1](cotangents[0])
        return masked.reshape(x.shape), *kernel_gradient

    convolve_and_pass_on.defvjp(lambda x, kernel: (convolve_and_pass_on(x, kernel), (x, kernel)), backward)

    class SharedConv(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", resnet.he_std, (1, 1, x.shape[-1], self.features), jnp.float32)
            return convolve_and_pass_on(x, kernel.astype(x.dtype))

    class Block(resnet.Block):
        @nn.compact
        def __call__(self, x):  # without drop-path
            width = 4 * self.features
            if self.stride != 1 or x.shape[-1] != width:
                return super().__call__(x)
            y, x = SharedConv(self.features, name="conv1")(x)
            y = self.relu(self.norm(name="bn1")(y))
            middle = self.norm(name="bn2")(self.conv(self.features, 3, name="conv2")(y))
            y = self.conv(width, 1, name="conv3")(self.relu(middle, centered=True), middle.norm.center_behind_relu)
            return self.relu(self.norm(zero_scale=True, name="bn3")(y), shortcut=x)

    plain = bn_relu._backward

    def backward_of_sum(fusion, residuals, masked):
        terms, y, has_shortcut = residuals
        if y is None or not sums:
            return plain(fusion, residuals, masked)
        masked, total, parts = lax.optimization_barrier((masked, sums.pop(), [term.sums(masked) for term in terms]))
        gradients = [term.gradient(fusion, masked, total=total, sums=part) for term, part in zip(terms, parts, strict=True)]
        return tuple(gradients), masked if has_shortcut else None

    resnet.Block = Block
    bn_relu.fused_bn_relu.defvjp(bn_relu._forward, backward_of_sum)


def float32_bias():
    """The bias of folded convolutions in float32, added to their result in float32."""
    plain = folded_batch_norm._convolve
    folded_batch_norm._convolve = lambda *arguments: plain(*arguments).astype(jnp.float32)


def matrix_products():
    """The folded convolutions as matrix products with a float32 result and bias, as on a CPU; Triton may fuse what follows."""
    plain = folded_batch_norm._convolve
    folded_batch_norm._convolve = lambda h, matrix, fusion: plain(h, matrix, fusion._replace(convolution="product"))


def moments_in_one_product():
    """Mean and covariance of h stacked, times the kernel, in place of two products."""

    def projected(self, kernel, axes=()):
        stacked = folded_batch_norm._matmul(jnp.concatenate([self.covariance, self.mean[None]]), kernel)
        mean, variance = stacked[-1], jnp.maximum((kernel * stacked[:-1]).sum(0), 0.0)
        return folded_batch_norm.mean_over(axes, (mean, variance + mean * mean))

    folded_batch_norm.InputMoments.projected = projected


def no_center():
    """The input of a block's last convolution is not centered."""
    resnet.centered_bn_relu = lambda fusion, term: bn_relu.fused_bn_relu(fusion, (term,))
    batch_norm.Normalization.center_behind_relu = None


def no_excess_precision():
    os.environ["XLA_FLAGS"] = "--xla_allow_excess_precision=false"


def convolutions_in_graphs():
    """Command buffers (CUDA graphs) may hold convolutions too."""
    os.environ["XLA_FLAGS"] = "--xla_gpu_enable_command_buffer=+CONVOLUTION"


def unchanged():
    pass


INTERPRET = False  # Pallas: run the kernel without a GPU
LEADS = {
    "unchanged": unchanged,
    "stem space to depth": stem_space_to_depth,
    "no excess precision": no_excess_precision,
    "input gradient kernel": input_gradient_kernel,
    "no center": no_center,
    "float32 bias": float32_bias,
    "matrix products with a float32 bias": matrix_products,
    "moments in one product": moments_in_one_product,
    "convolutions in graphs": convolutions_in_graphs,
}
FORMS = {"separate": [], "folded": ["--model.batch-norm", "folded"]}
# Where a block before has separate terms, the kernel of the input's gradient must read them. The others change folding.
ONLY_FOLDED = {input_gradient_kernel, no_center, float32_bias, matrix_products, moments_in_one_product, convolutions_in_graphs}


def measured(case: str) -> dict:
    lead, _, form = case.partition("; ")
    LEADS[lead]()
    return gpu_bytes.measured(case, FORMS[form], 256, "h200")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [
        f"{lead}; {form}" for form in FORMS for lead, patch in LEADS.items() if form == "folded" or patch not in ONLY_FOLDED
    ]
    parser.add_argument("--leads", nargs="+", default=cases, choices=cases)
    args = parser.parse_args()
    # A process for each: XLA reads its flags once, and a patch stays.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as one_by_one:
        results = list(one_by_one.map(measured, args.leads))
    gpu_bytes.write(RESULT, results, order=cases)
    for one in results:
        print(f"{one['case']:36} {one['kernels']:5} kernels {one['all_megabytes_an_image']:6.1f} MB an image")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
