"""The preprocessing that belongs to weights: read from timm's metadata, kept by an import, used by evaluate and predict."""

import dataclasses
import io
import json

import numpy as np
import pytest
from helpers import torch_layout
from helpers.images import encode, noise, published_evaluation, smooth_image
from helpers.served import save_random_run, softmax
from helpers.step import with_parts
from PIL import Image
from safetensors.numpy import save_file

import jaxdp
from jaxdp import ConfigError
from jaxdp.cli import main
from jaxdp.config import Config, Data, Preprocessing
from jaxdp.inference.evaluate import evaluate_weights
from jaxdp.inference.export import export
from jaxdp.inference.load_run import weights_config
from jaxdp.models import preprocessing

pytestmark = pytest.mark.usefixtures("two_blocks")
A1 = {  # of timm/resnet50.a1_in1k on the Hugging Face hub
    "tag": "a1_in1k",
    "custom_load": False,
    "input_size": [3, 224, 224],
    "test_input_size": [3, 288, 288],
    "fixed_input_size": False,
    "interpolation": "bicubic",
    "crop_pct": 0.95,
    "test_crop_pct": 1.0,
    "crop_mode": "center",
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "num_classes": 1000,
}
SMALL = {"input_size": [3, 32, 32], "test_input_size": [3, 40, 40], "crop_pct": 0.8, "interpolation": "bicubic"}
SMALL |= {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.25, 0.5]}
IN_FILE = Preprocessing(eval_size=40, eval_resize=0.8, eval_interpolation="bicubic", mean=(0.5, 0.5, 0.5), std=(0.5, 0.25, 0.5))


@pytest.fixture
def tensors():
    return torch_layout.random_tensors(1, (1, 1), False, width=4, classes=6)


@pytest.fixture
def file(tensors, tmp_path):
    """timm's file with `SMALL` in its metadata."""
    save_file(tensors, tmp_path / "timm.safetensors", {"format": "pt", "pretrained_cfg": json.dumps(SMALL)})
    return tmp_path / "timm.safetensors"


@pytest.fixture
def pictures(tmp_path):
    """A folder of six classes with an image of odd size each."""
    for split in ("train", "val"):
        for label in range(6):
            folder = tmp_path / "pics" / split / str(label)
            folder.mkdir(parents=True)
            (folder / "0.JPEG").write_bytes(encode(smooth_image(51 + 2 * label, 63, seed=label)))
    return tmp_path / "pics"


def timm_logits(tensors, data, *, size, ratio):
    """Logits of an encoded image by timm's definition, with Pillow and NumPy."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image = published_evaluation(image, resize=int(size / ratio), crop=size, interpolation="bicubic")
    pixels = np.asarray(image, np.float64) / 255
    pixels = (pixels - SMALL["mean"]) / SMALL["std"]
    return torch_layout.logits(tensors, pixels[None].transpose(0, 3, 1, 2))[0]


@pytest.mark.parametrize("beside", [None, {"pretrained_cfg": A1}, A1], ids=["metadata", "config.json", "old config.json"])
def test_preprocessing_of_timm_is_that_of_its_test(tensors, tmp_path, beside):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, {"format": "pt"} if beside else {"pretrained_cfg": json.dumps(A1)})
    if beside:
        (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet50"} | beside))
    stated = preprocessing.of_file(path)
    assert stated == Preprocessing(
        eval_size=288,
        eval_resize=1.0,
        eval_interpolation="bicubic",
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    )
    words = "evaluated at 288x288 from a short side of 288, bicubic, mean 0.485 0.456 0.406, std 0.229 0.224 0.225"
    assert preprocessing.describe(stated) == words


def test_config_json_of_something_else_states_nothing(tensors, tiny, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    for document in (dataclasses.asdict(tiny), {"architectures": ["ResNetForImageClassification"], "mean": "none"}, {}, []):
        (tmp_path / "config.json").write_text(json.dumps(document))
        assert preprocessing.of_file(tmp_path / "model.safetensors") == Preprocessing()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"crop_mode": "squash"}, "crop_mode is 'squash', not 'center'"),
        ({"input_size": [3, 32, 40]}, r"input_size is \[3, 32, 40\], not"),
        ({"input_size": [1, 32, 32]}, r"input_size is \[1, 32, 32\], not \[3, side, side\]"),
        ({"input_size": [3, 32]}, r"input_size is \[3, 32\], not"),
        ({"test_input_size": 32}, "test_input_size is 32, not"),
        *(({name: None}, f"{name} is null") for name in ("input_size", "interpolation", "crop_pct", "mean", "std")),
        ({"crop_pct": 1.01}, "a crop ratio of 1.01 is above 1"),
        ({"test_crop_pct": 1.5}, "a crop ratio of 1.5 is above 1"),
        ({"mean": [0.5]}, r"data.mean=\(0.5,\): must be three numbers"),
    ],
    ids=str,
)
def test_preprocessing_that_cannot_be_followed_is_refused_in_one_line(tensors, tmp_path, change, reason):
    save_file(tensors, tmp_path / "w.safetensors", {"pretrained_cfg": json.dumps(SMALL | change)})
    with pytest.raises(ConfigError, match=reason) as raised:
        preprocessing.of_file(tmp_path / "w.safetensors")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {}),
        ({"crop_pct": 1.0, "crop_mode": None}, {"eval_resize": 1.0}),
        ({"test_input_size": None, "test_crop_pct": None}, {"eval_size": 32}),
        ({"crop_pct": 0.5, "test_crop_pct": 0.9, "crop_mode": "center"}, {"eval_resize": 0.9}),
        ({"mean": [], "std": []}, {"mean": (), "std": ()}),
    ],
    ids=str,
)
def test_empty_entries_of_a_test_leave_those_of_the_training(tensors, tmp_path, change, expected):
    save_file(tensors, tmp_path / "w.safetensors", {"pretrained_cfg": json.dumps(SMALL | change)})
    assert preprocessing.of_file(tmp_path / "w.safetensors") == dataclasses.replace(IN_FILE, **expected)
    save_file(tensors, tmp_path / "none.safetensors", {"pretrained_cfg": "{}"})
    stated = preprocessing.of_file(tmp_path / "none.safetensors")
    assert stated == Preprocessing()
    assert preprocessing.describe(stated) == "evaluated at 224x224 from a short side of 256, bilinear"  # torchvision's


def test_given_values_replace_those_of_a_file_and_its_size_is_that_of_training_too():
    given = Preprocessing(eval_resize=50, std=(0.1, 0.2, 0.3))
    merged = preprocessing.merge(IN_FILE, given)
    assert merged == dataclasses.replace(IN_FILE, eval_resize=50, std=(0.1, 0.2, 0.3))
    data = Data(source="synthetic", image_size=16, eval_size=24, mean=(0.25, 0.25, 0.25))
    whole = preprocessing.with_preprocessing(data, merged)
    assert (whole.image_size, whole.eval_size, whole.eval_resize, whole.mean) == (40, 24, 50, (0.5, 0.5, 0.5))
    part = preprocessing.with_preprocessing(data, given)
    assert (part.image_size, part.eval_size, part.eval_interpolation, part.mean) == (16, 24, None, (0.25, 0.25, 0.25))


@pytest.mark.parametrize(("interpolation", "resize"), [(None, 28), ("bicubic", 28), ("area", 0.7142857142857143)])
def test_preprocessing_of_a_run_is_complete_and_relative_to_white(interpolation, resize):
    config = Config(
        data=Data(source="synthetic", image_size=16, eval_size=20, eval_resize=28, eval_interpolation=interpolation)
    )
    assert preprocessing.of_run(config, 51.0, (25.5, 51.0, 102.0)) == Preprocessing(
        eval_size=20,
        eval_resize=resize,
        eval_interpolation=interpolation or "bilinear",
        mean=(0.2, 0.2, 0.2),
        std=(0.1, 0.2, 0.4),
    )


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ('["a", "b"]', ["a", "b"]),
        ("[]", []),
        (None, None),
        *((wrong, ConfigError) for wrong in ("[1]", '{"a": 0}', '"a"', "[", "3")),
    ],
)
def test_class_names_of_a_file_are_a_list_of_texts(tensors, tmp_path, stated, expected):
    save_file(tensors, tmp_path / "w.safetensors", {"classes": stated} if stated else {})
    if expected is not ConfigError:
        assert preprocessing.classes_of(tmp_path / "w.safetensors", "FILE") == expected
        return
    with pytest.raises(
        ConfigError, match=r"^FILE='.*w.safetensors': the metadata 'classes' is not a list of names; correct or"
    ):
        preprocessing.classes_of(tmp_path / "w.safetensors", "FILE")


@pytest.mark.parametrize(
    ("metadata", "beside", "expected"),
    [
        ({"model": '{"blur_pool": "convolutions"}'}, "resnetblur50", "convolutions"),
        ({"model": '{"blur_pool": "cubic"}'}, None, "its metadata states the BlurPool 'cubic'"),
        (
            {"pretrained_cfg": '{"architecture": "resnetblur18"}'},
            "resnet18",
            "its metadata names the architecture 'resnetblur18'",
        ),
        ({"pretrained_cfg": '{"architecture": "resnet50"}'}, None, "none"),
        ({"pretrained_cfg": '{"architecture": "resnetaa50d"}'}, None, "its metadata names the architecture 'resnetaa50d'"),
        ({"pretrained_cfg": "[]"}, "resnetblur50", "config.json beside it names the architecture 'resnetblur50'"),
        ({"pretrained_cfg": "["}, "resnet50d", "none"),
        ({}, "resnetaa50", "config.json beside it names the architecture 'resnetaa50'"),
        ({}, "resnetv2_50", None),
        ({}, "vit_resnet50", None),
        ({}, None, None),
    ],
    ids=str,
)
def test_blur_pool_is_that_of_the_first_place_that_states_one(tmp_path, metadata, beside, expected):
    if beside:
        (tmp_path / "config.json").write_text(json.dumps({"architecture": beside}))
    if expected and " " in expected:
        with pytest.raises(ValueError, match=expected):
            preprocessing.stated_blur_pool(str(tmp_path / "w.safetensors"), metadata)
    else:
        assert preprocessing.stated_blur_pool(str(tmp_path / "w.safetensors"), metadata) == expected


def test_import_keeps_the_preprocessing_and_flags_replace_it(file, tmp_path, capsys):
    ours = tmp_path / "ours.safetensors"
    main.main(["import", str(file), "--output", str(ours)])
    line = "evaluated at 40x40 from a short side of 50, bicubic, mean 0.5 0.5 0.5, std 0.5 0.25 0.5"
    assert capsys.readouterr().out.splitlines()[1] == line
    assert preprocessing.of_file(ours) == IN_FILE
    flags = ["--data.eval-resize", "44", "--data.eval-interpolation", "bilinear", "--overwrite", "--json"]
    main.main(["import", str(file), "--output", str(ours), *flags])
    expected = dataclasses.replace(IN_FILE, eval_resize=44, eval_interpolation="bilinear")
    assert preprocessing.of_file(ours) == expected
    assert json.loads(capsys.readouterr().out)["preprocessing"]["eval_resize"] == 44


def test_predictions_and_evaluation_are_those_of_published_preprocessing(file, tensors, pictures, tmp_path, capsys):
    """With the file's preprocessing, from the imported file too, and with a flag in its place."""
    ours, image = tmp_path / "ours.safetensors", pictures / "val/3/0.JPEG"
    main.main(["import", str(file), "--output", str(ours)])
    for path, flags, size in ((file, [], 40), (ours, ["--data.eval-size", "48"], 48)):
        capsys.readouterr()
        main.main(["predict", "--weights", str(path), *flags, "--top", "6", "--json", str(image)])
        out, err = capsys.readouterr()
        assert f"evaluated at {size}x{size} from a short side of {size / 0.8:g}, bicubic, mean 0.5" in err
        logits = timm_logits(tensors, image.read_bytes(), size=size, ratio=0.8)
        expected = softmax(logits)
        (row,) = json.loads(out)["predictions"]
        for entry in row["top"]:
            assert entry["probability"] == pytest.approx(expected[entry["class"]], rel=1e-4)

    flags = ["--weights", str(file), "--data.source", "folder", "--data.directory", str(pictures)]
    main.main(["evaluate", *flags, "--json"])
    result = json.loads(capsys.readouterr().out)
    images = [path.read_bytes() for path in sorted((pictures / "val").glob("*/*"))]
    logits = np.stack([timm_logits(tensors, data, size=40, ratio=0.8) for data in images])
    losses = -np.log(softmax(logits)[np.arange(6), np.arange(6)])
    assert result["eval_loss"] == pytest.approx(losses.mean(), rel=1e-4)
    assert result["eval_accuracy"] == (logits.argmax(-1) == np.arange(6)).mean()


def test_flag_of_an_evaluation_replaces_the_resize_of_the_run(tiny_resnet, pictures, tmp_path, capsys):
    data = Data(source="folder", directory=str(pictures), image_size=16, eval_resize=0.8, train_split="val")
    config = dataclasses.replace(tiny_resnet, data=data)
    save_random_run(config, tmp_path / "run")
    flags = ["evaluate", "--workdir", str(tmp_path / "run"), "--data.eval-resize", "48"]
    main.main([*flags, "--json"])
    resized = json.loads(capsys.readouterr().out)["eval_loss"]
    cropped = jaxdp.evaluate(with_parts(config, data={"eval_resize": 16 / 48}), tmp_path / "run")
    assert resized == pytest.approx(cropped["eval_loss"], rel=1e-6)


def test_exported_weights_are_evaluated_as_their_run(tiny_resnet, tmp_path):
    logits_of_run = save_random_run(tiny_resnet, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "w.safetensors")
    config = weights_config(tmp_path / "w.safetensors")
    pair = [(np.stack([noise(16, 16) for _ in range(4)]), np.array([0, 1, 2, 5]))] * 2
    result, words = evaluate_weights(tmp_path / "w.safetensors", with_parts(config, data={"threads": 1}), datasets=pair)
    assert "evaluated at 16x16 from a short side of 16, bilinear, mean 0.5 0.5 0.5, std 0.203922" in words
    expected = -np.log(softmax(logits_of_run(pair[0][0]))[np.arange(4), pair[0][1]]).mean()
    assert result["eval_loss"] == pytest.approx(expected, rel=1e-5)
