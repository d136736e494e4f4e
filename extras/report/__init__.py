"""List runs, and compare them on one page. Page: docs/report.md.

- `run_folders`: reads run folders, which may be damaged or come from a stranger.
- `report`: the command `tessera report`, which writes the page. `runs`: the command `tessera runs`, a list.
- `table`: results and settings that differ, best run first; for the terminal, the page, CSV and Markdown.
- `extrapolation`: the expected last score of an unfinished run. `curves`: charts.
- `page`: puts all of it into page.html.
"""
