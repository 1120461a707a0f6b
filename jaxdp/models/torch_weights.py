"""Tensor names and layouts of torchvision's and timm's ResNets, which are the same.

`resnet18` to `resnet152` of both have conv1, bn1, layerN.M.convK, layerN.M.bnK, layerN.M.downsample.0 and .1, and fc. timm's
resnet50d has conv1.0 to conv1.6 for conv1, and layerN.M.downsample.1 and .2 behind the pooling.
Kernels are [out, in, H, W] and the classifier is [classes, features]. jaxdp has paths such as params/layer1_0/conv1/kernel,
kernels [H, W, in, out] and a classifier [features, classes]. Batch statistics are copied unchanged: PyTorch's running variance
is unbiased and jaxdp's is not, but evaluation uses both in the same way.
"""

import numpy as np

LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
LEAVES |= {"fc_kernel": "fc.weight", "fc_bias": "fc.bias"}
MODULES = {"downsample_conv": "downsample.0", "downsample_bn": "downsample.1"}
MODULES |= {"pooled_conv": "downsample.1", "pooled_bn": "downsample.2"}
MODULES |= {"stem_conv1": "conv1.0", "stem_bn1": "conv1.1", "stem_conv2": "conv1.3", "stem_bn2": "conv1.4"}
MODULES |= {"stem_conv3": "conv1.6"}
COUNTER = "num_batches_tracked"  # PyTorch stores it for each batch normalization; evaluation does not use it


TO_TORCH = {4: (3, 2, 0, 1), 2: (1, 0)}  # axes by number of dimensions: of kernels and the classifier
FROM_TORCH = {4: (2, 3, 1, 0), 2: (1, 0)}


def torch_name(name: str) -> str:
    """torchvision's name of a jaxdp tensor: layer1.0.bn1.weight for params/layer1_0/bn1/scale."""
    _, *modules, leaf = name.split("/")
    return ".".join([*(MODULES.get(module, module.replace("_", ".")) for module in modules), LEAVES.get(leaf, leaf)])


def torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in `to_torch_layout`."""
    return tuple(shape[axis] for axis in TO_TORCH.get(len(shape), range(len(shape))))


def to_torch_layout(tensor: np.ndarray) -> np.ndarray:
    """[H, W, in, out] to [out, in, H, W] and [in, out] to [out, in]; vectors unchanged."""
    return np.ascontiguousarray(tensor.transpose(TO_TORCH.get(tensor.ndim)))


def from_torch_layout(tensor: np.ndarray) -> np.ndarray:
    """The inverse of `to_torch_layout`."""
    return np.ascontiguousarray(tensor.transpose(FROM_TORCH.get(tensor.ndim)))


def to_torch(tensors: dict[str, np.ndarray], steps: int) -> dict[str, np.ndarray]:
    """jaxdp tensors by path, as a torchvision or timm state_dict. steps: training steps, for num_batches_tracked."""
    state_dict = {torch_name(name): to_torch_layout(tensor) for name, tensor in tensors.items()}
    counters = [name.replace("running_mean", COUNTER) for name in state_dict if name.endswith("running_mean")]
    return state_dict | {name: np.array(steps, np.int64) for name in counters}
