"""The page ``/spotlight`` on Dask's dashboard: shows a run that goes on; it decides nothing and changes nothing.

`facts` works out what is shown, `lanes`, `panels` and `text` draw it, `metrics` says it to Prometheus, and `plugin`
mounts all of it on a scheduler, also on one that already runs.
"""
