"""A bottleneck ResNet with the small stem in float64: written out anew, differentiated by JAX; for comparison."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdp.models.resnet import BLOCKS


def _convolve(x, kernel, stride=1):
    pad = kernel.shape[0] // 2
    dimensions = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), [(pad, pad)] * 2, dimension_numbers=dimensions)


def logits_and_moments(params, images, depth):
    """([B, classes], {normalization as nested names: {"mean", "square"}}) in training, of normalized images [B, H, W, 3]."""
    moments = {}

    def normalize(x, parameters, *path):
        mean, square = x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))
        where = moments
        for name in path:
            where = where.setdefault(name, {})
        where |= {"mean": mean, "square": square}
        deviation = x - mean
        return deviation / jnp.sqrt((deviation**2).mean((0, 1, 2)) + 1e-5) * parameters["scale"] + parameters["bias"]

    x = jax.nn.relu(normalize(_convolve(images, params["conv1"]["kernel"]), params["bn1"], "bn1"))
    for stage, blocks in enumerate(BLOCKS[depth]):
        for number in range(blocks):
            name = f"layer{stage + 1}_{number}"
            block, stride = params[name], 2 if stage and not number else 1

            def part(x, conv, norm, stride=1, *, block=block, name=name):
                return normalize(_convolve(x, block[conv]["kernel"], stride), block[norm], name, norm)

            y = jax.nn.relu(part(x, "conv1", "bn1"))
            y = jax.nn.relu(part(y, "conv2", "bn2", stride))
            shortcut = part(x, "downsample_conv", "downsample_bn", stride) if "downsample_conv" in block else x
            x = jax.nn.relu(part(y, "conv3", "bn3") + shortcut)
    return x.mean((1, 2)) @ params["fc_kernel"] + params["fc_bias"], moments


def mean_gradient(params, parts, depth, label_smoothing):
    """(gradient, loss, moments), each the mean over `parts`: (normalized images, labels) of each batch of a worker."""

    def loss_of(params, images, labels):
        logits, moments = logits_and_moments(params, images, depth)
        log = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log, labels[:, None], axis=-1)[:, 0]
        return -((1 - label_smoothing) * picked + label_smoothing * log.mean(-1)).mean(), moments

    def in_float64(tree):
        return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), tree)

    with jax.enable_x64():
        gradient_of = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
        found = [gradient_of(in_float64(params), in_float64(images), jnp.asarray(labels)) for images, labels in parts]
        (loss, moments), gradient = jax.tree.map(lambda *leaves: np.mean(np.stack(leaves), axis=0), *found)
    return gradient, loss, moments
