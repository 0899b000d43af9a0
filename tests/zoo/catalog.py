"""All architectures of the zoo, by name."""

from __future__ import annotations

from tests.zoo.arguments import ARGUMENTS
from tests.zoo.attention import ATTENTION
from tests.zoo.convolutional import CONVOLUTIONAL
from tests.zoo.graphs import GRAPHS
from tests.zoo.hugging_face_encoders import ENCODERS, TRANSLATORS
from tests.zoo.hugging_face_language import LANGUAGE
from tests.zoo.hugging_face_sounds import SOUNDS_AND_SERIES
from tests.zoo.hugging_face_vision import VISION_MODELS
from tests.zoo.package_tasks import PACKAGE_TASKS
from tests.zoo.parts import PARTS
from tests.zoo.recurrent import RECURRENT

GROUPS = {
    "Tasks of the package": PACKAGE_TASKS,
    "Images, signals, grids": CONVOLUTIONAL,
    "Recurrent networks": RECURRENT,
    "Attention, experts, sets": ATTENTION,
    "Graphs": GRAPHS,
    "Arguments, labels, losses": ARGUMENTS,
    "Functions, draws, branches, types": PARTS,
    "Hugging Face: language": LANGUAGE,
    "Hugging Face: encoders": ENCODERS,
    "Hugging Face: encoder and decoder": TRANSLATORS,
    "Hugging Face: images": VISION_MODELS,
    "Hugging Face: sounds, series, draws": SOUNDS_AND_SERIES,
}
ARCHITECTURES = {each.name: each for group in GROUPS.values() for each in group}
"""In the order of the table."""
GROUP_OF = {each.name: title for title, group in GROUPS.items() for each in group}
