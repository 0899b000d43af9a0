"""What the ranks of a launch must have alike before they train together."""

from __future__ import annotations

from pipeplan.launch.checks import Setup
from pipeplan.runtime.startup.facts import trained
from pipeplan.runtime.startup.process_group import JoinTerms


def of(setup: Setup) -> JoinTerms:
    """Those of a run that can begin on this rank."""
    options = setup.options
    flags = {
        "backend": options.backend,
        "first step": setup.first_step,
        "--steps": options.steps,
        "--save-every": options.save_every,
        "--save-in-background": options.save_in_background,
        "--keep": options.keep,
        "--keep-best": options.keep_best,
        "--validate-every": options.validate_every,
        "--allow-nonfinite": options.allow_nonfinite,
        "results kept (--out)": options.out is not None,
    }
    alike = setup.plan, setup.split, setup.task
    return JoinTerms(
        lambda: trained(
            *alike, seed=setup.seed, data=setup.data, flags=flags, witness=setup.witness
        ),
        options.out,
    )
