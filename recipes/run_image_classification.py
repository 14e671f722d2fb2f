#!/usr/bin/env python
"""Trains a model for image classification (ViT, DeiT, BEiT) in pipeline stages.

The data is scikit-learn's handwritten digits (the default: 1,797 images of 8 × 8, no download), a set from the hub
(`--dataset_name uoft-cs/cifar100 --label_column fine_label`), or folders of one's own with a folder of images for each
class (`--train_dir`, `--validation_dir`).

With the fixed transforms (resize and normalise) an image is the same in every epoch, so its frozen layers' output
is kept and taken from the activation cache. With `--augment` it is another one each time: the cache finds no image,
notices that and turns itself off.

All arguments can stand in one YAML or JSON file, given first; those after it on the command line win:

    accelerate launch --config_file accelerate_configs/cpu_2.yaml recipes/run_image_classification.py \
        recipes/configs/digits.yaml
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, load_dataset
from PIL import Image as PILImage
from PIL import ImageOps
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    EvalPrediction,
    PretrainedConfig,
    ViTImageProcessorPil,
    default_data_collator,
)

from hf_pipetransformer import PipeTransformerTrainer

from common import (
    LABEL,
    SMALL_MODEL,
    ModelArguments,
    Names,
    PartArguments,
    evaluate,
    in_order_of,
    labels_of,
    load_config,
    load_model,
    parse_arguments,
    print_summary,
    refuse_prediction,
    split_names,
    start,
    take_part,
    train,
)
from metrics import accuracy_metrics

logger = logging.getLogger(__name__)

SMALLEST_CROP = 0.7
"""Least share of an image's area that `--augment` leaves of it."""
MOST_PATCHES_A_SIDE = 14
"""A model made from scratch cuts an image into at most so many patches a side; of 8 pixels, into 4 of 2."""


@dataclass
class DataTrainingArguments(PartArguments):
    """The data for training and evaluation; by default the digits of scikit-learn."""

    dataset_name: str | None = field(default=None, metadata={"help": "A set of images on the hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration, if it has several."})
    train_dir: str | None = field(default=None, metadata={"help": "A folder that holds a folder for each class."})
    validation_dir: str | None = field(default=None, metadata={"help": "The same for the validation images."})
    image_column: str | None = field(default=None, metadata={"help": "None: the first column of images."})
    label_column: str | None = field(default=None, metadata={"help": "None: the first column of classes."})
    validation_share: float = field(
        default=0.2, metadata={"help": "Share of the training images to validate on, where there are no others."}
    )
    image_size: int | None = field(
        default=None, metadata={"help": "Pixels a side, for a model made from scratch. Digits: 8, others: 32."}
    )
    augment: bool = field(default=False, metadata={"help": "Train on random parts of the images."})
    augment_flip: bool = field(default=False, metadata={"help": "With augment: mirror every second image, too."})

    def __post_init__(self) -> None:
        if self.dataset_name is not None and (self.train_dir or self.validation_dir):
            raise ValueError("Give dataset_name, or train_dir and validation_dir, not both; neither means the digits.")
        if not 0.0 < self.validation_share < 1.0:
            raise ValueError(f"validation_share={self.validation_share} must lie between 0 and 1.")
        if self.augment_flip and not self.augment:
            raise ValueError("augment_flip needs augment.")

    @property
    def wants_digits(self) -> bool:
        """Whether the data is scikit-learn's."""
        return not (self.dataset_name or self.train_dir or self.validation_dir)


# ---------------------------------------------------------------------------------------------------- data
def load_images(
    data_args: DataTrainingArguments, seed: int, cache_dir: str | None = None, known: Names | None = None
) -> DatasetDict:
    """Loads the splits with columns `image` and `label`; splits the training images where there are no others.

    Args:
        data_args: which images.
        seed: of the images that are split off.
        cache_dir: where downloads are kept.
        known: a checkpoint's classes. If it knows all classes of the data, they keep its order.
    """
    if data_args.wants_digits:
        splits = DatasetDict(train=load_digits())
    elif data_args.dataset_name is not None:
        splits = load_dataset(data_args.dataset_name, data_args.dataset_config_name, cache_dir=cache_dir)
    else:
        given = {"train": data_args.train_dir, "validation": data_args.validation_dir}
        splits = load_folders({name: path for name, path in given.items() if path is not None}, cache_dir)
    if "validation" not in splits and "test" in splits and _first_of(ClassLabel, splits["test"]):
        splits["validation"] = splits["test"]
    used = [name for name in splits if name.startswith(("train", "validation"))]  # test images often have no classes
    splits = DatasetDict({name: with_usual_columns(splits[name], data_args) for name in used})
    splits = with_classes_of(known, splits)
    if "validation" not in splits:
        whole = splits[split_names("train", splits)[0]]
        splits = split_off(whole, data_args.validation_share, seed)
    return splits


def load_folders(folders: Mapping[str, str], cache_dir: str | None = None) -> DatasetDict:
    """Reads a folder of images for each split, by itself: together, all would have to be of one depth.

    The images of a folder with a single class have none at first (`datasets` takes it for one without classes). They
    get it where another folder has the class, too.
    """

    def load(name: str, **options: Any) -> Dataset:
        files = {name: f"{folders[name]}/**"}
        return load_dataset("imagefolder", data_files=files, split=name, cache_dir=cache_dir, **options)

    def classes(split: Dataset) -> set[str]:
        column = _first_of(ClassLabel, split)
        return set() if column is None else set(split.features[column].names)

    splits = DatasetDict({name: load(name) for name in folders})
    known = set().union(*map(classes, splits.values()))
    for name in [name for name, split in splits.items() if known and not classes(split)]:
        named = load(name, drop_labels=False)
        own_name = Path(folders[name]).resolve().name  # the class of images that lie in no folder of a class
        if classes(named) <= known - {own_name}:
            splits[name] = named
    return splits


def split_off(whole: Dataset, share: float, seed: int) -> DatasetDict:
    """Splits a share of the images off to validate on: of each class, or of all where that cannot be."""
    numbers, counts = np.unique(whole[LABEL][:], return_counts=True)
    held_out = math.ceil(share * len(whole))
    reason = None
    if counts.min() < 2:
        reason = f"class {whole.features[LABEL].names[numbers[counts.argmin()]]!r} has one image"
    elif min(held_out, len(whole) - held_out) < len(counts):
        reason = f"{len(whole) - held_out} and {held_out} images are too few for {len(counts)} classes"
    if reason is not None:
        logger.warning(
            "The images are split into training and validation without regard to their classes, as %s: some classes"
            " may be missing from either. Give validation_dir, another validation_share, or more images.",
            reason,
        )
    parts = whole.train_test_split(share, seed=seed, stratify_by_column=LABEL if reason is None else None)
    return DatasetDict(train=parts["train"], validation=parts["test"])


def with_classes_of(known: Names | None, splits: DatasetDict) -> DatasetDict:
    """The splits with the same classes: a checkpoint's, if it knows all names, or else the data's own.

    Folders may lack some of each other's classes; then the data's are all of them, in the order of their names.
    """
    given = [tuple(split.features[LABEL].names) for split in splits.values()]
    own = given[0] if len(set(given)) == 1 else tuple(sorted(set().union(*given)))
    names = in_order_of(known, own) or own
    return DatasetDict({name: with_classes(split, names) for name, split in splits.items()})


def with_classes(split: Dataset, names: Sequence[str]) -> Dataset:
    """The split with its classes numbered as among `names`. No image is decoded."""
    own = split.features[LABEL].names
    if list(names) == own:
        return split
    place = {name: number for number, name in enumerate(names)}
    number_of = {number: place[name] for number, name in enumerate(own)}
    numbers = [number_of.get(number, number) for number in split[LABEL][:]]  # -1: the image has no class
    return split.remove_columns(LABEL).add_column(LABEL, numbers, feature=ClassLabel(names=list(names)))


def load_digits() -> Dataset:
    """scikit-learn's handwritten digits, which come with it: grey images of 8 × 8."""
    from sklearn import datasets as sklearn_datasets

    digits = sklearn_datasets.load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # they count from 0 to 16
    classes = ClassLabel(names=[str(name) for name in digits.target_names])
    return Dataset.from_dict(
        {"image": [PILImage.fromarray(image) for image in pixels], LABEL: digits.target.tolist()},
        features=Features({"image": Image(), LABEL: classes}),
    )


def with_usual_columns(split: Dataset, data_args: DataTrainingArguments) -> Dataset:
    """Names the columns `image` and `label` and drops the others.

    Raises:
        ValueError: a column is missing, or holds something else.
    """
    image = data_args.image_column or _first_of(Image, split)
    label = data_args.label_column or _first_of(ClassLabel, split)
    for kind, name, argument in ((Image, image, "image_column"), (ClassLabel, label, "label_column")):
        if name is None or not isinstance(split.features.get(name), kind):
            raise ValueError(
                f"{argument}={name!r} is no column of {kind.__name__}; the columns are"
                f" {', '.join(f'{key} ({type(value).__name__})' for key, value in split.features.items())}."
            )
    split = split.select_columns([image, label])
    return split.rename_columns({old: new for old, new in ((image, "image"), (label, LABEL)) if old != new})


def _first_of(kind: type, split: Dataset) -> str | None:
    return next((name for name, feature in split.features.items() if isinstance(feature, kind)), None)


# ---------------------------------------------------------------------------------------------------- transforms
class Transform:
    """Turns a batch of images into the model's inputs, when the batch is read. Workers of a loader can receive it.

    Args:
        processor: resizes and normalises, as the model was pretrained with.
        num_channels: 1 (grey) or 3.
        augment: cut a random part of each image out first. Draws from Python's generator, which the trainer seeds for
            each batch, so all stages of a pipeline see the same.
        flip: mirror every second image, by chance, too.
    """

    def __init__(self, processor: Any, num_channels: int, augment: bool = False, flip: bool = False) -> None:
        self.processor = processor
        self.mode = "L" if num_channels == 1 else "RGB"
        self.augment, self.flip = augment, flip

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        images = [image.convert(self.mode) for image in batch["image"]]
        if self.augment:
            images = [random_part(image) for image in images]
        if self.flip:
            images = [ImageOps.mirror(image) if random.random() < 0.5 else image for image in images]
        pixels = self.processor(images, return_tensors="np")["pixel_values"]
        return {"pixel_values": list(pixels), "labels": batch[LABEL]}


def random_part(image: PILImage.Image) -> PILImage.Image:
    """A random part of the image, of its own shape, enlarged to its size."""
    share = random.uniform(SMALLEST_CROP, 1.0) ** 0.5
    width, height = image.width * share, image.height * share
    left, top = random.uniform(0, image.width - width), random.uniform(0, image.height - height)
    box = (left, top, left + width, top + height)
    return image.resize(image.size, PILImage.Resampling.BILINEAR, box=box)


# ---------------------------------------------------------------------------------------------------- model
def make_config(model_args: ModelArguments, data_args: DataTrainingArguments, splits: DatasetDict) -> PretrainedConfig:
    """The model's config with the data's labels; of a model made from scratch with the images' size, too."""
    names = next(iter(splits.values())).features[LABEL].names
    size = data_args.image_size or (8 if data_args.wants_digits else 32)
    small = {
        "model_type": "vit",
        "image_size": size,
        "patch_size": max(2, -(-size // MOST_PATCHES_A_SIDE)),
        "num_channels": 1 if data_args.wants_digits else 3,
        "use_absolute_position_embeddings": True,  # BEiT; else it would not know where a patch is
        **SMALL_MODEL,
    }
    labels = {"label2id": {name: i for i, name in enumerate(names)}, "id2label": dict(enumerate(names))}
    # a checkpoint of several labels an image would keep its own problem_type
    return load_config(model_args, small, problem_type="single_label_classification", **labels)


def make_processor(model_args: ModelArguments, config: PretrainedConfig) -> Any:
    """The processor that the model was pretrained with, or one that resizes and scales to [-1, 1]."""
    if model_args.model_name_or_path is not None:
        return AutoImageProcessor.from_pretrained(model_args.model_name_or_path, **model_args.hub)
    half = [0.5] * config.num_channels
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return ViTImageProcessorPil(size={"height": height, "width": width}, image_mean=half, image_std=half)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """The share of images with the right class."""
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    return accuracy_metrics(np.argmax(logits, axis=-1), np.asarray(prediction.label_ids))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains and evaluates as the arguments say.

    Every rank must call this. Returns the metrics of training and evaluation.
    """
    model_args, data_args, training_args = parse_arguments(
        sys.argv[1:] if arguments is None else arguments, DataTrainingArguments
    )
    refuse_prediction(training_args)
    training_args.remove_unused_columns = False  # the transforms read `image`, which no model knows
    start(training_args)

    known = labels_of(model_args)
    with training_args.main_process_first(desc="loading of the data"):
        splits = load_images(data_args, training_args.seed, model_args.cache_dir, known)
    config = make_config(model_args, data_args, splits)
    model = load_model(AutoModelForImageClassification, model_args, config)
    processor = make_processor(model_args, config)
    channels = getattr(config, "num_channels", 3)

    train_dataset = eval_dataset = None
    if training_args.do_train:
        images = take_part(splits[split_names("train", splits)[0]], data_args.max_train_samples, training_args.seed)
        transform = Transform(processor, channels, data_args.augment, data_args.augment_flip)
        train_dataset = images.with_transform(transform)
    if training_args.do_eval:
        images = take_part(splits["validation"], data_args.max_eval_samples, training_args.seed)
        eval_dataset = images.with_transform(Transform(processor, channels))

    trainer = PipeTransformerTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        processing_class=processor,
        data_collator=default_data_collator,
    )
    results = {**train(trainer), **evaluate(trainer, {} if eval_dataset is None else {"validation": eval_dataset})}
    if training_args.push_to_hub:
        trainer.push_to_hub(finetuned_from=model_args.model_name_or_path, tasks="image-classification")
    print_summary(trainer, results)
    return results


if __name__ == "__main__":
    record(main)()  # a launcher then shows the error itself
