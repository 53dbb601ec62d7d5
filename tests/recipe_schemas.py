"""What recipes for other people's systems may say: the parts that we use of their published schemas, in brief.

From Kubernetes 1.33's API (PodSpec, ServiceSpec, Job, ConfigMap), dask-kubernetes' custom resources (`DaskCluster`,
`DaskWorkerGroup`) and SkyPilot's task (`sky/utils/schemas.py`), as published in 2026. A field that is not here is an
error, so that a misspelt one is found; whoever uses another field adds it, after a look at the original.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer", "minimum": 0}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
QUANTITY: Schema = {"type": ["string", "integer"], "pattern": "^[0-9]+(\\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def fields(*required: str, **known: Schema) -> Schema:
    """An object with these fields and no others."""
    return {"type": "object", "required": list(required), "properties": known, "additionalProperties": False}


def some(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


CONTAINER = fields(
    "name",
    "image",
    name=NAME,
    image=TEXT,
    command=some(TEXT),
    env=some(fields("name", "value", name=TEXT, value=TEXT)),
    envFrom=some(fields(secretRef=fields("name", name=NAME), configMapRef=fields("name", name=NAME))),
    ports=some(fields("containerPort", name={**NAME, "maxLength": 15}, containerPort=NUMBER)),
    resources=fields(
        limits={"type": "object", "additionalProperties": QUANTITY},
        requests={"type": "object", "additionalProperties": QUANTITY},
    ),
    volumeMounts=some(fields("name", "mountPath", name=NAME, mountPath=TEXT, readOnly={"type": "boolean"})),
)
VOLUME = {
    **fields(
        "name",
        name=NAME,
        secret=fields("secretName", secretName=NAME, defaultMode=NUMBER),
        configMap=fields("name", name=NAME, defaultMode=NUMBER),
        emptyDir=fields(medium=one_of("", "Memory"), sizeLimit=QUANTITY),
        persistentVolumeClaim=fields("claimName", claimName=NAME, readOnly={"type": "boolean"}),
    ),
    "minProperties": 2,
    "maxProperties": 2,
}
POD = fields(
    "containers",
    containers=some(CONTAINER),
    volumes=some(VOLUME),
    restartPolicy=one_of("Always", "OnFailure", "Never"),
    terminationGracePeriodSeconds=NUMBER,
    nodeSelector=TEXTS,
    tolerations=some(
        fields(
            key=TEXT,
            operator=one_of("Exists", "Equal"),
            value=TEXT,
            effect=one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
        )
    ),
)
METADATA = fields("name", name=NAME, labels=TEXTS, annotations=TEXTS)
SERVICE = fields(
    "type",
    "selector",
    "ports",
    type=one_of("ClusterIP", "NodePort", "LoadBalancer"),
    selector=TEXTS,
    ports=some(
        fields(
            "port",
            name=NAME,
            protocol=one_of("TCP", "UDP"),
            port=NUMBER,
            targetPort={"type": ["string", "integer"]},
        )
    ),
)
WORKERS = fields("spec", replicas=NUMBER, metadata=METADATA, spec=POD)


def resource(version: str, kind: str, **more: Schema) -> Schema:
    whole = {"apiVersion": one_of(version), "kind": one_of(kind), "metadata": METADATA, **more}
    return fields(*whole, **whole)


RESOURCES: dict[str, Schema] = {
    "DaskCluster": resource(
        "kubernetes.dask.org/v1",
        "DaskCluster",
        spec=fields(
            "scheduler",
            "worker",
            idleTimeout=NUMBER,
            scheduler=fields("service", "spec", metadata=METADATA, service=SERVICE, spec=POD),
            worker=WORKERS,
        ),
    ),
    "DaskWorkerGroup": resource(
        "kubernetes.dask.org/v1", "DaskWorkerGroup", spec=fields("cluster", "worker", cluster=NAME, worker=WORKERS)
    ),
    "ConfigMap": resource("v1", "ConfigMap", data=TEXTS),
    "Job": resource(
        "batch/v1",
        "Job",
        spec=fields("template", backoffLimit=NUMBER, template=fields("spec", metadata=METADATA, spec=POD)),
    ),
}
"""By kind."""

TEXT_OR_NULL: Schema = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
SKYPILOT = fields(
    name=TEXT,
    workdir=TEXT,
    num_nodes=NUMBER,
    resources=fields(
        infra=TEXT,
        accelerators=TEXT,
        cpus={"type": ["string", "number"]},
        memory={"type": ["string", "number"]},
        instance_type=TEXT,
        use_spot={"type": "boolean"},
        disk_size={"type": ["string", "integer"]},
        ports={"type": ["string", "integer", "array"]},
        image_id=TEXT,
        job_recovery=fields(strategy={"type": ["string", "null"]}, max_restarts_on_errors=NUMBER),
    ),
    envs=TEXT_OR_NULL,
    secrets=TEXT_OR_NULL,
    file_mounts=TEXTS,
    setup=TEXT,
    run=TEXT,
)
