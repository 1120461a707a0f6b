"""A ResNet in evaluation mode as nodes of an ONNX graph, whose tensors have torchvision's names and layouts (NCHW)."""

from typing import Any, NamedTuple

import numpy as np

from jaxdp.config import Model
from jaxdp.models.batch_norm import EPSILON
from jaxdp.models.blur import BLURRED_POOLS, Padding, blurs_input, pool_padding
from jaxdp.models.resnet import BLOCKS, BOTTLENECK_DEPTHS

BLUR = np.outer([1, 2, 1], [1, 2, 1]).astype(np.float32) / 16


class Graph:
    """Nodes of an ONNX graph in the order of their computation, and its constants. Values are named; needs the package onnx."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        from onnx import helper

        output = output or f"{operator.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def constant(self, name: str, value: np.ndarray) -> str:
        """Store a tensor and return its name."""
        from onnx import numpy_helper

        self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name


class Map(NamedTuple):
    """A value [N, channels, side, side] of a graph."""

    name: str
    channels: int
    side: int


def _window(size: int, stride: int, pad: int) -> dict[str, Any]:
    return {"kernel_shape": [size, size], "strides": [stride, stride], "pads": [pad] * 4}


class ResNetNodes:
    """Adds a ResNet to a graph. tensors: float32, by torchvision's names."""

    def __init__(self, graph: Graph, config: Model, tensors: dict[str, np.ndarray]) -> None:
        self.graph, self.config, self.tensors = graph, config, tensors

    def logits(self, images: Map, output: str) -> str:
        """Add the nodes of the whole network; returns `output`, the name of the logits [N, classes]."""
        add, depth = self.graph.add, self.config.depth
        x = self._stem(images)
        for stage, blocks in enumerate(BLOCKS[depth], 1):
            for block in range(blocks):
                x = self._block(x, f"layer{stage}.{block}", stride=2 if stage > 1 and block == 0 else 1)
        means = add("Flatten", add("GlobalAveragePool", x.name))
        return add("Gemm", means, self._weight("fc.weight"), self._weight("fc.bias"), transB=1, output=output)

    def _weight(self, name: str) -> str:
        return self.graph.constant(name, self.tensors[name])

    def _relu(self, x: Map) -> Map:
        return x._replace(name=self.graph.add("Relu", x.name))

    def _conv(self, x: Map, name: str, stride: int = 1) -> Map:
        features, channels, size, _ = self.tensors[f"{name}.weight"].shape
        side = -(-x.side // stride)
        if blurs_input(self.config.blur_pool, channels, stride):
            x = self._blur(x, stride if size == 1 else 1)
            stride = 1 if size == 1 else stride
        parameters = (f"{name}.{leaf}" for leaf in ("weight", "bias"))
        inputs = [x.name, *(self._weight(parameter) for parameter in parameters if parameter in self.tensors)]
        return Map(self.graph.add("Conv", *inputs, **_window(size, stride, size // 2)), features, side)

    def _norm(self, x: Map, name: str) -> Map:
        parameters = (self._weight(f"{name}.{leaf}") for leaf in ("weight", "bias", "running_mean", "running_var"))
        return x._replace(name=self.graph.add("BatchNormalization", x.name, *parameters, epsilon=EPSILON))

    def _blur(self, x: Map, stride: int, padding: Padding = "constant") -> Map:
        """See `jaxdp.models.blur.blur`."""
        add, channels, name, pad = self.graph.add, x.channels, x.name, 1
        if padding == "reflect":
            mode = "reflect" if x.side > 1 else "edge"  # as in NumPy
            around = self.graph.constant("pad_of_blur", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
            name, pad = add("Pad", name, around, mode=mode), 0
        kernel = self.graph.constant(f"blur_{channels}", np.broadcast_to(BLUR, (channels, 1, 3, 3)))
        name = add("Conv", name, kernel, group=channels, **_window(3, stride, pad))
        return Map(name, channels, -(-x.side // stride))

    def _stem(self, images: Map) -> Map:
        config = self.config
        if config.stem == "small":
            return self._relu(self._norm(self._conv(images, "conv1"), "bn1"))
        if config.stem == "deep":
            x = self._relu(self._norm(self._conv(images, "conv1.0", 2), "conv1.1"))
            x = self._conv(self._relu(self._norm(self._conv(x, "conv1.3"), "conv1.4")), "conv1.6")
        else:
            x = self._conv(images, "conv1", 2)
        x = self._relu(self._norm(x, "bn1"))
        stride = 1 if config.blur_pool in BLURRED_POOLS else 2
        x = Map(self.graph.add("MaxPool", x.name, **_window(3, stride, 1)), x.channels, -(-x.side // stride))
        return x if stride == 2 else self._blur(x, 2, pool_padding(config.blur_pool))

    def _block(self, x: Map, name: str, stride: int) -> Map:
        """A residual block, basic or bottleneck; see `jaxdp.models.resnet.Block`."""
        blurs = self.config.blur_pool == "activations" and stride != 1
        strided = 1 if blurs else stride
        strides = (1, strided, 1) if self.config.depth in BOTTLENECK_DEPTHS else (strided, 1)
        y = x
        for number, step in enumerate(strides, 1):
            y = self._norm(self._conv(y, f"{name}.conv{number}", step), f"{name}.bn{number}")
            if number < len(strides):
                y = self._relu(y)
            if blurs and number == len(strides) - 1:
                y = self._blur(y, stride, "reflect")
        if self.config.squeeze_excitation:
            y = self._excite(y, f"{name}.se")
        if f"{name}.downsample.2.weight" in self.tensors:
            x = self._average(x) if stride > 1 else x
            x = self._norm(self._conv(x, f"{name}.downsample.1"), f"{name}.downsample.2")
        elif f"{name}.downsample.0.weight" in self.tensors:
            x = self._norm(self._conv(x, f"{name}.downsample.0", stride), f"{name}.downsample.1")
        return self._relu(y._replace(name=self.graph.add("Add", y.name, x.name)))

    def _average(self, x: Map) -> Map:
        """See `jaxdp.models.convolution.average_pool`."""
        name = self.graph.add("AveragePool", x.name, ceil_mode=1, **_window(2, 2, 0))
        return Map(name, x.channels, -(-x.side // 2))

    def _excite(self, x: Map, name: str) -> Map:
        """Multiply by the factor of `jaxdp.models.squeeze_excitation`."""
        add = self.graph.add
        means = Map(add("GlobalAveragePool", x.name), x.channels, 1)
        gate = self._conv(self._relu(self._conv(means, f"{name}.fc1")), f"{name}.fc2")
        return x._replace(name=add("Mul", x.name, add("Sigmoid", gate.name)))
