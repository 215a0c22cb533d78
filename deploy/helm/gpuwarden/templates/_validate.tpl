{{/* Fails for keys that the chart does not have, with what to write instead: dict "values" MAP "known" MAP "path"
TEXT "reference" MAP. A known map that is empty takes any keys. */}}
{{- define "gpuwarden.unknownKeys" -}}
{{- range $key, $value := .values }}
{{- $path := ternary $key (printf "%s.%s" $.path $key) (eq $.path "") }}
{{- if not (hasKey $.known $key) }}
{{- with index $.reference $path }}
{{- fail (printf "\n\n%s: %s\n" $path .) }}
{{- end }}
{{- $place := ternary "the chart" $.path (eq $.path "") }}
{{- fail (printf "\n\n%s: %s has no such value; it has %s\n" $path $place (keys $.known | sortAlpha | join ", ")) }}
{{- end }}
{{- $inner := index $.known $key }}
{{- if and (kindIs "map" $value) (kindIs "map" $inner) $inner }}
{{- include "gpuwarden.unknownKeys" (dict "values" $value "known" $inner "path" $path "reference" $.reference) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Fails for values that do not go together. */}}
{{- define "gpuwarden.validate" -}}
{{- $known := .Files.Get "files/keys.yaml" | fromYaml }}
{{- $reference := .Files.Get "files/reference.yaml" | fromYaml }}
{{- include "gpuwarden.unknownKeys" (dict "values" .Values "known" $known "path" "" "reference" $reference) }}
{{- $injector := merge (dict "enabled" "") $known.preflight }}
{{- include "gpuwarden.unknownKeys" (dict "values" (index .Values "preflight-injector") "known" $injector "path" "preflight-injector" "reference" dict) }}
{{- $acts := .Values.quarantine.enabled }}
{{- if and .Values.quarantine.dryRun (not $acts) }}
{{- fail "\n\nquarantine.dryRun: it shows the decisions of a quarantine; set quarantine.enabled too\n" }}
{{- end }}
{{- if and .Values.drain.enabled (not $acts) }}
{{- fail "\n\ndrain.enabled: only nodes that are out of service are drained; set quarantine.enabled too\n" }}
{{- end }}
{{- if and .Values.remediation.enabled (not .Values.drain.enabled) }}
{{- fail "\n\nremediation.enabled: only drained nodes are remediated; set drain.enabled too\n" }}
{{- end }}
{{- if and .Values.janitor.enabled .Values.quarantine.dryRun }}
{{- fail "\n\njanitor.enabled: a janitor has no dry run; set janitor.enabled=false beside quarantine.dryRun\n" }}
{{- end }}
{{- if and .Values.labeler.enabled .Values.quarantine.dryRun }}
{{- fail "\n\nlabeler.enabled: labels have no dry run; set labeler.enabled=false beside quarantine.dryRun\n" }}
{{- end }}
{{- if and .Values.validation.enabled (not .Values.janitor.enabled) }}
{{- fail "\n\nvalidation.enabled: the janitor carries out ValidationRequests; set janitor.enabled too\n" }}
{{- end }}
{{- if and .Values.validation.enabled (not .Values.validation.config) }}
{{- fail "\n\nvalidation.config: it names the tests that a ValidationRequest may ask for, and is empty (docs/validation.md)\n" }}
{{- end }}
{{- if and .Values.policy.config .Values.policy.preset }}
{{- fail "\n\npolicy: set policy.config or policy.preset, not both\n" }}
{{- end }}
{{- if and .Values.objects.config .Values.objects.preset }}
{{- fail "\n\nobjects: set objects.config or objects.preset, not both\n" }}
{{- end }}
{{- if and .Values.objects.resources (not .Values.objects.config) }}
{{- fail "\n\nobjects.resources: they are the kinds of objects.config, which is empty; a preset needs none\n" }}
{{- end }}
{{- if and (eq .Values.agent.kernelLog "kmsg") (not .Values.agent.privileged) }}
{{- fail "\n\nagent.kernelLog: only a privileged container may open /dev/kmsg; set agent.privileged too, or journal\n" }}
{{- end }}
{{- if and (eq .Values.gpuAccess "hostDriver") (not .Values.agent.privileged) }}
{{- fail "\n\ngpuAccess: hostDriver opens the devices of the driver itself, which only a privileged container may; set agent.privileged too, or another way\n" }}
{{- end }}
{{- if and (gt (int .Values.controller.replicas) 1) (or .Values.controller.persistence.enabled .Values.controller.persistence.existingClaim) }}
{{- fail "\n\ncontroller.persistence: a volume belongs to one pod; set controller.replicas to 1, or no persistence (the others stand by with stores of their own)\n" }}
{{- end }}
{{- range $part, $resources := dict "agent" .Values.agent.resources "controller" .Values.controller.resources "preflight" .Values.preflight.resources }}
{{- range $kind, $amounts := $resources }}
{{- if hasKey $amounts "nvidia.com/gpu" }}
{{- fail (printf "\n\n%s.resources.%s: nvidia.com/gpu takes a GPU from workloads; gpuwarden reaches GPUs without one (gpuAccess)\n" $part $kind) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
