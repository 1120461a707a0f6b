"""Files of `jaxdp export --format stablehlo`, and what both formats for serving refuse."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import jax
import jax.export
import numpy as np
import pytest
from helpers import flax_nets, torch_layout
from helpers.runs import train_shown
from helpers.served import BATCHES, PREPARATIONS, assert_close, random_images, save_random_run, softmax
from safetensors.numpy import load_file

import jaxdp
from jaxdp import register_model
from jaxdp.analysis import aot
from jaxdp.analysis.gpu_targets import GPU_TARGETS, target_config
from jaxdp.cli import main
from jaxdp.config import Data, Model
from jaxdp.errors import ConfigError
from jaxdp.inference import export_onnx, serving
from jaxdp.inference.export import export
from jaxdp.loggers.console import Screen
from jaxdp.models import weights

HARMLESS_CALLS = {"shape_assertion"}  # of jax.export, which removes it when it knows the number of images


def read(path):
    """(function of images, metadata) of a file, as its documentation says."""
    return jax.jit(jax.export.deserialize(path.read_bytes()).call), json.loads(zipfile.ZipFile(path).read("metadata.json"))


def test_file_has_the_logits_of_evaluation_and_of_numpy_for_every_number_of_images(tiny_resnet, tmp_path):
    logits = save_random_run(tiny_resnet, tmp_path / "run")
    (tmp_path / "run/classes.json").write_text(json.dumps(["ä", "b", "c"]))
    exported = export(tmp_path / "run", tmp_path / "new/m.jaxexport", format="stablehlo")
    file = tmp_path / "new/m.jaxexport"
    call, metadata = read(file)
    export(tmp_path / "run", tmp_path / "w.safetensors", format="torchvision")
    tensors = load_file(tmp_path / "w.safetensors")
    images = random_images(max(BATCHES), 16)
    of_evaluation = np.asarray(logits(images))
    normalized = (images / 255 - 0.5) / (52 / 255)  # the statistics of synthetic images
    of_numpy = torch_layout.logits(tensors, normalized.transpose(0, 3, 1, 2), small_stem=True)
    for count in BATCHES:
        found = call(images[:count])
        assert_close(found["logits"], of_evaluation[:count])
        assert_close(found["logits"], of_numpy[:count])
        np.testing.assert_allclose(found["probabilities"], softmax(of_numpy[:count]), atol=1e-6)
    assert exported["bytes"] == file.stat().st_size
    assert metadata == {
        "jaxdp_version": jaxdp.__version__,
        "recipe": "tiny",
        "task": "classes",
        "network": "ResNet-18",
        "class_names": ["ä", "b", "c", "class 3", "class 4", "class 5"],
        "client_preprocessing": {
            "color": "RGB",
            "resize_short_side": 16,
            "interpolation": "bilinear",
            "center_crop": 16,
        },
        "included_preprocessing": {"image_size": 16, "mean": [0.5] * 3, "std": pytest.approx([52 / 255] * 3)},
        "dtype": "float32",
        "samples": 160,
        "epoch": 3.2,
        "accuracy": 0.5,
        "weights_digest": weights.read(tmp_path / "w.safetensors").digest,
    }


def test_program_is_for_both_platforms_and_has_no_foreign_calls_or_paths(tiny_resnet, tmp_path):
    save_random_run(tiny_resnet, tmp_path / "run")
    files = [tmp_path / "a.jaxexport", tmp_path / "b.jaxexport"]
    for file in files:
        export(tmp_path / "run", file, format="stablehlo")
    program = jax.export.deserialize(files[0].read_bytes())
    assert (program.platforms, program.nr_devices) == (("cpu", "cuda"), 1)
    assert [str(aval.shape[0]) for aval in (*program.in_avals, *program.out_avals)] == ["N"] * 3
    text = program.mlir_module()
    assert set(re.findall(r"custom_call @(\w+)", text)) <= HARMLESS_CALLS
    assert "stablehlo.convolution" in text
    assert str(Path(jaxdp.__file__).parents[1]).encode() not in files[0].read_bytes()
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
def test_registered_model_with_averaged_weights_predicts_as_its_run(tiny, tmp_path, monkeypatch, capsys):
    """Its apply needs the number of images when it is traced."""
    optimizer = dataclasses.replace(tiny.optimizer, average_decay=0.5)
    result = train_shown(dataclasses.replace(tiny, optimizer=optimizer), tmp_path / "run", screen=Screen(quiet=True))
    file = tmp_path / "m.jaxexport"
    run = ["--workdir", str(tmp_path / "run"), "--output", str(file)]
    main.main(["export", *run, "--format", "stablehlo"])
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.startswith(f"{file}: normalized_linear (stablehlo), {file.stat().st_size:,} bytes, from ")
    call, metadata = read(file)
    assert metadata["accuracy"] == result.accuracy
    images = random_images(5, 16)
    predicted = jaxdp.predict(tmp_path / "run", images, top=6)
    probabilities = np.asarray(call(images)["probabilities"])
    np.testing.assert_allclose(np.take_along_axis(probabilities, predicted.classes, 1), predicted.probabilities, rtol=1e-5)
    monkeypatch.setattr(export_onnx, "check_installed", lambda: None)
    with pytest.raises(ConfigError, match=r"^--format='onnx': the run's model is 'normalized_linear'.*; use stablehlo$"):
        export(tmp_path / "run", tmp_path / "m.onnx", format="onnx")


@pytest.mark.parametrize("name", PREPARATIONS)
def test_client_gives_images_as_evaluation_loads_them(tiny_resnet, name):
    data, side = PREPARATIONS[name]
    config = dataclasses.replace(tiny_resnet, data=data)
    served = serving.ServedModel(config, {}, {}, serving._preprocessing(config))
    assert served.side == side == served.metadata["client_preprocessing"]["center_crop"]
    assert served.metadata["included_preprocessing"]["image_size"] == data.evaluated_size
    mean = served.metadata["included_preprocessing"]["mean"]
    assert mean == pytest.approx(list(data.mean) or [0.5] * 3)


def test_client_of_a_run_that_evaluates_by_area_crops_first(tiny_resnet):
    data = Data(source="given", image_size=16, eval_size=32, eval_resize=0.875, eval_interpolation="area")
    steps = serving._preprocessing(dataclasses.replace(tiny_resnet, data=data))["client_preprocessing"]
    assert steps == {"color": "RGB", "interpolation": "area", "center_crop_share": 0.875, "resize": 32}


@pytest.mark.slow
def test_run_in_half_precision_is_exported_in_float32_unless_asked(tiny_resnet, tmp_path):
    config = dataclasses.replace(tiny_resnet, model=dataclasses.replace(tiny_resnet.model, dtype="bfloat16"))
    logits, images = save_random_run(config, tmp_path / "run"), random_images(3, 16)
    found = {}
    for dtype in ("float32", "bfloat16"):
        export(tmp_path / "run", tmp_path / f"{dtype}.jaxexport", format="stablehlo", dtype=dtype)
        call, metadata = read(tmp_path / f"{dtype}.jaxexport")
        assert metadata["dtype"] == dtype
        found[dtype] = np.asarray(call(images)["logits"])
    assert_close(found["float32"], logits(images))
    error = np.abs(found["bfloat16"] - found["float32"]).max() / np.abs(found["float32"]).max()
    assert 1e-4 < error < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen_stages", "linen_remat", "nnx"])
def test_flax_modules_have_the_logits_of_evaluation(tiny, tmp_path, kind):
    register_model("net", flax_nets.BUILDERS[kind])
    logits = save_random_run(dataclasses.replace(tiny, model=Model(name="net", classes=6)), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "m.jaxexport", format="stablehlo")
    call, _ = read(tmp_path / "m.jaxexport")
    images = random_images(max(BATCHES), 16)
    expected = np.asarray(logits(images))
    for count in BATCHES:
        assert_close(call(images[:count])["logits"], expected[:count])


class Callback:
    """A model that calls back into Python, which no file can hold."""

    def __init__(self, config):
        self.classes = config.classes

    def init(self, key, image_shape):
        return {"bias": np.zeros(self.classes)}, {}

    def apply(self, params, batch_stats, images, train):
        shape = jax.ShapeDtypeStruct((images.shape[0], self.classes), np.float32)
        return jax.pure_callback(lambda x: np.zeros(shape.shape), shape, images, vmap_method="sequential"), {}


def test_model_that_no_file_can_hold_is_refused_in_one_line(tiny, tmp_path):
    register_model("callback", Callback)
    save_random_run(dataclasses.replace(tiny, model=Model(name="callback", classes=6)), tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"^model.name='callback': the model cannot be exported to StableHLO: \w+: .*"
    ) as error:
        export(tmp_path / "run", tmp_path / "m.jaxexport", format="stablehlo")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "m.jaxexport").exists()


@pytest.mark.parametrize(
    ("output", "options", "field"),
    [
        ("m.bin", {"format": "stablehlo"}, "--output"),
        ("m.safetensors", {"format": "onnx"}, "--output"),
        ("m.safetensors", {"dtype": "bfloat16"}, "--dtype"),
        ("there.jaxexport", {"format": "stablehlo"}, "--output"),
        ("m.jaxexport", {"format": "tflite"}, "--format"),
    ],
)
def test_unusable_output_is_refused_before_the_run_is_loaded(tmp_path, monkeypatch, output, options, field):
    monkeypatch.setattr(export_onnx, "check_installed", lambda: None)
    (tmp_path / "there.jaxexport").write_bytes(b"mine")
    with pytest.raises(ConfigError) as refused:
        export(tmp_path / "none", tmp_path / output, **options)
    assert refused.value.field == field
    assert (tmp_path / "there.jaxexport").read_bytes() == b"mine"


def test_onnx_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(export_onnx.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^--format='onnx': .*\[onnx\]"):
        export(tmp_path / "none", tmp_path / "m.onnx", format="onnx")


@pytest.mark.slow
def test_large_weights_are_refused_and_a_pipe_is_written(tiny_resnet, tmp_path, capsys, monkeypatch):
    save_random_run(tiny_resnet, tmp_path / "run")
    file, pipe = tmp_path / "m.jaxexport", tmp_path / "pipe.jaxexport"
    command = ["export", "--workdir", str(tmp_path / "run"), "--format", "stablehlo", "--output"]
    with monkeypatch.context() as patched:
        patched.setattr(serving, "MOST_BYTES", 1000)
        with pytest.raises(ConfigError, match=r"^--format='stablehlo': .* 2 GiB; use jaxdp$"):
            export(tmp_path / "run", file, format="stablehlo")
    main.main([*command, str(file), "--json"])
    assert json.loads(capsys.readouterr().out)["metadata"] == read(file)[1]

    os.mkfifo(pipe)
    received = io.BytesIO()
    reader = threading.Thread(target=lambda: received.write(pipe.read_bytes()))
    reader.start()
    main.main([*command, str(pipe)])
    reader.join(120)
    assert received.getvalue() == file.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.jaxexport", "pipe.jaxexport", "run"]


COMPILE_FOR_GPU = """
import re, sys
import jax, jax.export
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

path, target = sys.argv[1:]
call = jax.export.deserialize(open(path, "rb").read()).call
(device,) = topologies.get_topology_desc("", platform="cuda", target_config=target, topology="1x1x1").devices
placed = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
images = jax.ShapeDtypeStruct((8, 16, 16, 3), np.uint8, sharding=placed)
text = jax.jit(call).trace(images).lower(lowering_platforms=("cuda",)).compile().as_text()
assert "jaxdp" not in sys.modules
print(sorted(set(re.findall(r'custom_call_target="([^"]+)"', text))))
"""


@pytest.mark.slow
@pytest.mark.skipif(aot.unavailable_reason() is not None, reason=str(aot.unavailable_reason()))
def test_program_compiles_for_a_gpu_without_jaxdp(tiny_resnet, tmp_path):
    save_random_run(tiny_resnet, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "m.jaxexport", format="stablehlo")
    command = [sys.executable, "-c", COMPILE_FOR_GPU, tmp_path / "m.jaxexport", target_config(GPU_TARGETS["h100"])]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300).stdout
    assert "__cudnn$convForward" in out
