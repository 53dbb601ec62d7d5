"""The page ``/spotlight`` on Dask's dashboard: shows a live run; it decides nothing and changes nothing.

`facts` computes what is shown, `lanes`, `panels` and `text` draw it, `metrics` exports it to Prometheus, and `plugin`
mounts all of it on a scheduler, also on one that already runs.
"""
