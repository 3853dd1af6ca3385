from espalier.errors import Error as Error, Unsupported as Unsupported
from espalier.verbs import (
    bench as bench,
    doctor as doctor,
    generate as generate,
    grpo as grpo,
    inspect as inspect,
    plan as plan,
    replay as replay,
    report as report,
    score as score,
    train as train,
    verify as verify,
)

__all__ = ["Error", "Unsupported", "inspect", "plan", "train", "score", "verify", "replay", "bench", "generate", "grpo", "report", "doctor"]
__version__: str
