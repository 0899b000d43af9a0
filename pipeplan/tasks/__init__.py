"""Ready tasks for examples and benchmarks: well-known models from own code, no downloads.

Each function returns a `pipeplan.task.Task` with synthetic data that can be learned. The function
`transformers` takes a model of Hugging Face and data of yours instead. Name one on the command
line with or without arguments:

    pipeplan profile pipeplan.tasks:resnet -o chain.json
    pipeplan profile "pipeplan.tasks:gpt2(size='medium', batch=4)" -o chain.json
"""

from pipeplan.tasks.crossmodal import crossmodal
from pipeplan.tasks.densenet import densenet
from pipeplan.tasks.gpt2 import gpt2
from pipeplan.tasks.inception import inception
from pipeplan.tasks.llama import llama
from pipeplan.tasks.mixer import mixer
from pipeplan.tasks.resnet import resnet
from pipeplan.tasks.siamese import siamese
from pipeplan.tasks.t5 import t5
from pipeplan.tasks.transformers import save_pretrained, transformers
from pipeplan.tasks.unet import unet
from pipeplan.tasks.vit import vit

__all__ = [
    "crossmodal",
    "densenet",
    "gpt2",
    "inception",
    "llama",
    "mixer",
    "resnet",
    "save_pretrained",
    "siamese",
    "t5",
    "transformers",
    "unet",
    "vit",
]
