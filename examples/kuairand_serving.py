"""What a click model loses where its rows are served in fewer bytes: AUC and logloss of 30 April at each dtype.

    python examples/kuairand_serving.py             # trains as kuairand_dlrm.py does, then serves what it has saved
    python examples/kuairand_serving.py --resume    # goes on from its checkpoint; where all is done, serves it

Data and options are those of kuairand_dlrm.py. What must stay true: all dtypes score the same events with the dense
weights of one checkpoint, so float32 has the figures of training, bit for bit.
"""

from kuairand_dlrm import TABLES, hold, load, parse, predict, run, scores
from served_model import DTYPES, load as load_served, scorer_of

# Of a weight, and of a row beside its weights: a scale and where it begins.
BYTES = {"float32": (4, 0), "float16": (2, 0), "int8": (1, 8), "int4": (0.5, 4)}


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Run the script. Returns the figures of each dtype."""
    arguments = parse(argv)
    with hold(arguments.workdir):
        log = load(arguments)
        run(arguments, log)
        found: dict[str, dict[str, float]] = {}
        for dtype in DTYPES:
            served = load_served(arguments.workdir, dtype, arguments.threads).current
            weight, beside = BYTES[dtype]
            (snapshot,) = served.snapshots.values()
            (file,) = (arguments.workdir / TABLES / "serving").glob(f"*-{snapshot.identity}-{dtype}.serving")
            found[dtype] = {
                **scores(log, predict(scorer_of(served), log)),
                "row_bytes": weight * arguments.dim + beside,
                "file_bytes": file.stat().st_size,
            }
    print(f"rows served as {'':9} AUC     logloss  bytes a row  MiB of the file, with its ids")
    for name, figures in found.items():
        print(
            f"{name:24} {figures['auc']:.4f}  {figures['logloss']:.4f}  {figures['row_bytes']:11.0f}"
            f"  {figures['file_bytes'] / 2**20:5.2f}"
        )
    return found


if __name__ == "__main__":
    main()
