"""A ResNet's weights under the names and in the layouts of torchvision and timm, which share them.

`resnet18` to `resnet152` of both: conv1, bn1, layerN.M.convK, layerN.M.bnK, layerN.M.downsample.0 and .1, fc; convolutions
[out, in, height, width], the classifier [classes, features]. Ours have paths such as params/layer1_0/conv1/kernel, convolutions
[height, width, in, out]. Statistics of batch normalisation are taken as they are: PyTorch's moving variance is that of an
unbiased estimator, ours is not, and evaluation uses either in the same way.
"""

import numpy as np

LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
LEAVES |= {"fc_kernel": "fc.weight", "fc_bias": "fc.bias"}
MODULES = {"downsample_conv": "downsample.0", "downsample_bn": "downsample.1"}
COUNTER = "num_batches_tracked"  # of each batch normalisation, which PyTorch keeps and evaluation does not use


def torch_name(name: str) -> str:
    """The name that torchvision gives to a tensor of ours, as params/layer1_0/bn1/scale: layer1.0.bn1.weight."""
    _, *modules, leaf = name.split("/")
    return ".".join([*(MODULES.get(module, module.replace("_", ".")) for module in modules), LEAVES[leaf]])


def torch_layout(tensor: np.ndarray) -> np.ndarray:
    """[H, W, in, out] to [out, in, H, W], [in, out] to [out, in]; others as they are."""
    places = {4: (3, 2, 0, 1), 2: (1, 0)}.get(tensor.ndim)
    return np.ascontiguousarray(tensor.transpose(places)) if places else tensor


def our_layout(tensor: np.ndarray) -> np.ndarray:
    """The inverse of `torch_layout`."""
    places = {4: (2, 3, 1, 0), 2: (1, 0)}.get(tensor.ndim)
    return np.ascontiguousarray(tensor.transpose(places)) if places else tensor


def to_torch(tensors: dict[str, np.ndarray], steps: int) -> dict[str, np.ndarray]:
    """Our tensors by their paths, as torchvision and timm name and lay them out. steps: training steps that were taken."""
    found = {torch_name(name): torch_layout(tensor) for name, tensor in tensors.items()}
    counters = [name.replace("running_mean", COUNTER) for name in found if name.endswith("running_mean")]
    return found | {name: np.array(steps, np.int64) for name in counters}
