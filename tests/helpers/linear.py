"""The smallest network with statistics, for tests of what does not depend on the model."""

import jax
import jax.numpy as jnp


class NormalizedLinear:
    """Batch normalization of the images, then a linear classifier: the smallest network with statistics. It compiles in a third
    of the time of a ResNet of two blocks."""

    def __init__(self, config):
        self.classes = config.classes

    def init(self, key, image_shape):
        channels, features = image_shape[-1], self.features(jnp.zeros((1, *image_shape))).size
        params = {"kernel": 0.01 * jax.random.normal(key, (features, self.classes)), "bias": jnp.zeros(self.classes)}
        return params, {"norm": {"mean": jnp.zeros(channels), "var": jnp.ones(channels)}}

    def apply(self, params, batch_stats, images, train):
        mean, square = images.mean((0, 1, 2)), (images**2).mean((0, 1, 2))
        stats = {"mean": mean, "var": jnp.maximum(square - mean**2, 0)} if train else batch_stats["norm"]
        images = (images - stats["mean"]) * jax.lax.rsqrt(stats["var"] + 1e-5)
        logits = self.features(images) @ params["kernel"] + params["bias"]
        return logits, {"norm": {"mean": mean, "square": square}} if train else {}

    def features(self, images):
        return images.reshape(len(images), -1)


class PooledLinear(NormalizedLinear):
    """The same on the means of 4x4 parts, so for images of any height and width that 4 divides."""

    def features(self, images):
        batch, height, width, channels = images.shape
        parts = images.reshape(batch, 4, height // 4, 4, width // 4, channels)
        return parts.mean((2, 4)).reshape(batch, -1)
