"""Compare methods on your images at equal compute, with errors. Page: docs/compare.md.

- `compare`: the command `tessera compare`, which trains, scores, and writes compare.json, compare.md and compare.html.
- `plan`: settings, and the steps of each method, which are measured once and written to plan.json.
- `cells`: trains one method with one seed in a process of its own. Each cell is a normal run folder.
- `other`: trains with the adapter of another library. `jobs`: submits the cells to SLURM.
- `compute`: a sink of metrics that records the processor time of a run.
- `correct`: which images an encoder gets right; `outcomes` stores them.
- `decision`: errors over seeds and images, and differences that are not chance.
- `page`: the page.

Needs: report.
"""
