"""Reads manifests in YAML from standard input; writes each as a line of JSON: the object, and what
the schemas of the API say against it, for each version of Kubernetes that the arguments name."""

import json
import sys

import kubernetes_validate
import yaml

for manifest in yaml.safe_load_all(sys.stdin):
    if manifest is None:
        continue
    errors = []
    # The Prometheus Operator defines this kind: Kubernetes has no schema of it.
    if manifest["kind"] != "PodMonitor":
        for version in sys.argv[1:]:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                where = "/".join(map(str, error.path))
                errors.append(f"Kubernetes {version}: {where}: {error.message}")
    print(json.dumps({"object": manifest, "errors": errors}))
