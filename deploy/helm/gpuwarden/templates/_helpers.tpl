{{/* Image of agent, controller and webhook. */}}
{{- define "gpuwarden.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end }}

{{/* Image of gpuwarden's preflight checks. */}}
{{- define "gpuwarden.checksImage" -}}
{{- .Values.preflight.image | default (printf "%s-checks:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion)) -}}
{{- end }}

{{/* Labels of all objects. */}}
{{- define "gpuwarden.labels" -}}
app.kubernetes.io/name: gpuwarden
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Metadata of an object of a part: dict "part" NAME "root" . ["cluster" true]. */}}
{{- define "gpuwarden.metadata" -}}
name: gpuwarden-{{ .part }}
{{- if not .cluster }}
namespace: {{ .root.Release.Namespace }}
{{- end }}
labels:
  {{- include "gpuwarden.labels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .part }}
  app: gpuwarden-{{ .part }}
{{- end }}

{{/* True if the controller writes in the cluster. */}}
{{- define "gpuwarden.acts" -}}
{{- if and .Values.quarantine.enabled (not .Values.quarantine.dryRun) }}true{{ end -}}
{{- end }}

{{/* True if the controllers elect a leader. */}}
{{- define "gpuwarden.elects" -}}
{{- if or (include "gpuwarden.acts" .) .Values.janitor.enabled .Values.labeler.enabled (gt (int .Values.controller.replicas) 1) }}true{{ end -}}
{{- end }}

{{/* True if the preflight webhook is deployed: by NVSentinel's value, or by that of ADR-026. */}}
{{- define "gpuwarden.preflight" -}}
{{- if or .Values.global.preflight.enabled (index .Values "preflight-injector").enabled }}true{{ end -}}
{{- end }}

{{/* Configuration of the webhook: without the keys of its Deployment, so that `image` is that of the checks, and
without empty ones, which have the defaults of the webhook. */}}
{{- define "gpuwarden.preflightConfig" -}}
{{- $config := omit (index .Values "preflight-injector") "enabled" }}
{{- $own := omit .Values.preflight "replicaCount" "nodeSelector" "tolerations" "affinity" "resources" "networkPolicy" "extraArgs" "webhook" }}
{{- $_ := set $own "image" (include "gpuwarden.checksImage" .) }}
{{- $_ := set $own "webhook" (pick .Values.preflight.webhook "failurePolicy") }}
{{- range $key, $value := $own }}
{{- if and (not (hasKey $config $key)) (or (kindIs "bool" $value) (not (empty $value))) }}{{ $_ := set $config $key $value }}{{ end }}
{{- end }}
{{- toYaml $config }}
{{- end }}

{{/* Issuer of the webhook's certificate. */}}
{{- define "gpuwarden.webhookCertProvider" -}}
{{- .Values.preflight.webhook.certProvider | default .Values.certProvider -}}
{{- end }}

{{/* Way of the agent to the GPUs: runtimeClass, hostDriver, draAdmin or none. The last is for a cluster without
the RuntimeClass, and without a DeviceClass that the namespace may use with admin access; without a cluster (`helm
template`) the RuntimeClass counts as there. */}}
{{- define "gpuwarden.gpuAccess" -}}
{{- if ne .Values.gpuAccess "auto" -}}
{{ .Values.gpuAccess }}
{{- else if not .Values.nvml.enabled -}}
none
{{- else if not .Values.runtimeClassName -}}
none
{{- else if eq (include "gpuwarden.lacks" (dict "kind" "RuntimeClass" "api" "node.k8s.io/v1" "name" .Values.runtimeClassName)) "" -}}
runtimeClass
{{- else if and (include "gpuwarden.hasDeviceClass" .) (include "gpuwarden.mayHaveAdminAccess" .) -}}
draAdmin
{{- else -}}
none
{{- end -}}
{{- end }}

{{/* True if the cluster has the DeviceClass of NVIDIA's GPUs. */}}
{{- define "gpuwarden.hasDeviceClass" -}}
{{- if and (.Capabilities.APIVersions.Has "resource.k8s.io/v1") (lookup "resource.k8s.io/v1" "DeviceClass" "" "gpu.nvidia.com") }}true{{ end -}}
{{- end }}

{{/* True if claims of the release's namespace may have admin access. */}}
{{- define "gpuwarden.mayHaveAdminAccess" -}}
{{- $namespace := lookup "v1" "Namespace" "" .Release.Namespace -}}
{{- if eq (dig "metadata" "labels" "resource.kubernetes.io/admin-access" "" $namespace) "true" }}true{{ end -}}
{{- end }}

{{/* Says that the cluster has no object of a kind by its name; empty without a cluster. */}}
{{- define "gpuwarden.lacks" -}}
{{- if and (lookup "v1" "Namespace" "" "kube-system") (not (lookup .api .kind "" .name)) -}}
the cluster has no {{ .kind }} {{ .name }}
{{- end -}}
{{- end }}

{{/* Scheduling of the pods of a part, by its values. */}}
{{- define "gpuwarden.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Fields that all pods have. */}}
{{- define "gpuwarden.pod" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClass.name }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Security context of the containers of controller and webhook: Pod Security `restricted`. */}}
{{- define "gpuwarden.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Security context of their pods. */}}
{{- define "gpuwarden.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Volume with the authority of the controller's certificate, as ca.crt. */}}
{{- define "gpuwarden.authorityVolume" -}}
name: authority
{{- if eq .Values.certProvider "cert-manager" }}
secret:
  secretName: gpuwarden-controller-cert
  items: [{key: ca.crt, path: ca.crt}]
{{- else if eq .Values.certProvider "openshift-service-ca" }}
configMap:
  name: gpuwarden-service-ca
  items: [{key: service-ca.crt, path: ca.crt}]
{{- else }}
configMap: {name: gpuwarden-ca}
{{- end }}
{{- end }}

{{/* Volume with the token that identifies a pod to the controller. */}}
{{- define "gpuwarden.tokenVolume" -}}
name: token
projected:
  sources:
    - serviceAccountToken: {audience: gpuwarden, expirationSeconds: 3600, path: token}
{{- end }}

{{/* Peers of a NetworkPolicy that may read metrics. */}}
{{- define "gpuwarden.metricsIngress" -}}
{{- with .root.Values.networkPolicy.metricsFrom }}
- from:
    {{- toYaml . | nindent 4 }}
  ports:
    - {port: {{ $.port }}}
{{- end }}
{{- end }}

{{/* Environment of the audit log. */}}
{{- define "gpuwarden.auditEnv" -}}
- {name: AUDIT_ENABLED, value: "true"}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}

{{/* Environment of the controller: one variable for each flag that the values set. */}}
{{- define "gpuwarden.controllerEnv" -}}
{{- $own := .Release.Namespace }}
{{- $set := dict "NAMESPACE" $own "AGENTS" (printf "%s/gpuwarden-agent" $own) "LISTEN" "0.0.0.0:2112" "DATA_DIR" "/var/lib/gpuwarden" }}
{{- $monitors := .Values.controller.centralMonitors }}
{{- if include "gpuwarden.preflight" . }}
{{- $monitors = append $monitors (printf "%s/gpuwarden-webhook" $own) }}
{{- end }}
{{- $_ := merge $set (dict "CENTRAL_MONITORS" (join "," $monitors) "RETENTION" .Values.controller.retention "STORE_SIZE" .Values.controller.storeSize) }}
{{- $_ := merge $set (dict "GPU_NODE_LABEL" .Values.gpuNodeLabel "LOG" .Values.logLevel "LOG_FORMAT" .Values.logFormat) }}
{{- $_ := set $set "LEADER_ELECT" (include "gpuwarden.elects" . | default "false") }}
{{- if ne .Values.certProvider "own" }}
{{- $_ := merge $set (dict "GRPC_TLS_CERT" "/etc/gpuwarden/tls/tls.crt" "GRPC_TLS_KEY" "/etc/gpuwarden/tls/tls.key") }}
{{- end }}
{{- if .Values.quarantine.enabled }}
{{- $_ := merge $set (dict "QUARANTINE" "true" "DRY_RUN" (toString .Values.quarantine.dryRun)) }}
{{- with .Values.reports }}
{{- $_ := merge $set (dict "NODE_CONDITIONS" (toString .conditions) "GPU_HEALTHY" (toString .gpuHealthy) "NODE_EVENTS" (toString .events) "NODE_EVENT_TYPE" .eventType) }}
{{- end }}
{{- else }}
{{- $_ := set $set "OBSERVE" "true" }}
{{- end }}
{{- if .Values.policy.config }}
{{- $_ := set $set "POLICY" "/etc/gpuwarden/policy/policy.toml" }}
{{- else if .Values.policy.preset }}
{{- $_ := set $set "POLICY" (printf "preset:%s" .Values.policy.preset) }}
{{- end }}
{{- if not .Values.analysis.enabled }}
{{- $_ := set $set "ANALYZE" "false" }}
{{- else if .Values.analysis.rules }}
{{- $_ := set $set "RULES" "/etc/gpuwarden/rules/rules.toml" }}
{{- end }}
{{- $files := "/etc/gpuwarden/config" }}
{{- if .Values.drain.enabled }}
{{- $_ := merge $set (dict "DRAIN" "true" "DRAIN_CONFIG" (ternary (print $files "/drain.toml") "" (not (empty .Values.drain.config)))) }}
{{- end }}
{{- if .Values.remediation.enabled }}
{{- $_ := merge $set (dict "REMEDIATE" "true" "REMEDIATE_CONFIG" (ternary (print $files "/remediation.toml") "" (not (empty .Values.remediation.config)))) }}
{{- end }}
{{- if .Values.janitor.enabled }}
{{- $_ := merge $set (dict "JANITOR" "true" "JANITOR_CONFIG" (print $files "/janitor.yaml") "JANITOR_TTL" .Values.janitor.ttl) }}
{{- if .Values.validation.enabled }}
{{- $_ := set $set "VALIDATION_CONFIG" (print $files "/validation.yaml") }}
{{- end }}
{{- end }}
{{- if .Values.maintenance.config }}
{{- $_ := set $set "MAINTENANCE" (print $files "/maintenance.toml") }}
{{- end }}
{{- with .Values.labeler }}
{{- if .enabled }}
{{- $_ := merge $set (dict "LABEL_NODES" "true" "DCGM_APP_LABEL" .dcgmAppLabel "DRIVER_APP_LABEL" .driverAppLabel "GKE_INSTALLER_APP_LABEL" .gkeInstallerAppLabel) }}
{{- $_ := merge $set (dict "KATA_LABEL" .kataLabelOverride "DCGM_VERSION" .dcgmVersion "EXPECTED_DEVICE_COUNTS_CONFIG_FILE" (ternary (print $files "/labeler.toml") "" (not (empty .config)))) }}
{{- $_ := merge $set (dict "ASSUME_DRIVER_INSTALLED" (toString .assumeDriverInstalled) "ASSUME_DCGM_AVAILABLE" (toString .assumeDCGMAvailable) "REQUIRE_DCGM_READY_FOR_BOOTSTRAP" (toString .requireDCGMReadyForBootstrap)) }}
{{- end }}
{{- end }}
{{- if .Values.objects.config }}
{{- $_ := set $set "OBJECTS" (print $files "/objects.toml") }}
{{- else if .Values.objects.preset }}
{{- $_ := set $set "OBJECTS" (print "preset:" .Values.objects.preset) }}
{{- end }}
{{- range $name, $value := $set }}
{{- if $value }}
- {name: GPUWARDEN_{{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Settings of the agent, as variables of its environment. */}}
{{- define "gpuwarden.agentEnv" -}}
{{- $set := dict "CONTROLLER" (printf "https://gpuwarden-controller.%s.svc:50051" .Release.Namespace) "TLS_CA" "/etc/gpuwarden/authority/ca.crt" "TOKEN_FILE" "/var/run/secrets/gpuwarden/token" }}
{{- $_ := merge $set (dict "SOCKET" "/var/run/nvsentinel/nvsentinel.sock" "DEVICE_API" "/var/run/device-api/device.sock" "DATA_DIR" "/var/lib/gpuwarden") }}
{{- $_ := merge $set (dict "GPU_METADATA" "/var/lib/nvsentinel/gpu_metadata.json" "POD_RESOURCES" "/var/lib/kubelet/pod-resources/kubelet.sock") }}
{{- $_ := merge $set (dict "LISTEN" "0.0.0.0:2112" "KERNEL_LOG" .Values.agent.kernelLog "DCGM_ADDR" .Values.agent.dcgmAddr "LOG" .Values.logLevel "LOG_FORMAT" .Values.logFormat) }}
{{- if .Values.agent.catalog }}
{{- $_ := set $set "CATALOG" "/etc/gpuwarden/catalog/catalog.toml" }}
{{- end }}
{{- range $name, $value := $set }}
{{- if $value }}
- {name: GPUWARDEN_{{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Mount of the audit log. */}}
{{- define "gpuwarden.auditMount" -}}
{{- if .Values.auditLog.enabled }}
- {name: audit, mountPath: /var/log/nvsentinel}
{{- end }}
{{- end }}

{{/* Volume of the audit log. */}}
{{- define "gpuwarden.auditVolume" -}}
{{- if .Values.auditLog.enabled }}
- name: audit
  {{- toYaml .Values.auditLog.volume | nindent 2 }}
{{- end }}
{{- end }}
