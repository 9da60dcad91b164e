{{- define "twheel.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end -}}
{{- end }}

{{- define "twheel.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "twheel.labels" -}}
{{ include "twheel.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "twheel.objectLabels" -}}
{{ include "twheel.labels" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "twheel.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Options as TOML. A value in JSON is one in TOML, too. */ -}}
{{- define "twheel.local" -}}
{{- $options := deepCopy .Values.options -}}
{{- if .Values.reap.enabled }}{{ $_ := set $options "dry-run" false }}{{ end -}}
{{- range $name, $value := $options }}
{{ $name }} = {{ toJson $value }}
{{- end }}
{{- end }}

{{- /* The address of the metrics, as an environment variable. */ -}}
{{- define "twheel.address" -}}
{{- if and .Values.podMonitor.enabled (eq .Values.metrics.address "127.0.0.1") -}}
$(POD_IP)
{{- else -}}
{{ .Values.metrics.address }}
{{- end -}}
{{- end }}

{{- /* What a probe asks: without a host it is the address of the pod, which is the node's. */ -}}
{{- define "twheel.probe" -}}
httpGet:
  {{- $address := include "twheel.address" . }}
  {{- if not (contains "$(POD_IP)" $address) }}
  host: {{ $address | trimPrefix "[" | trimSuffix "]" | quote }}
  {{- end }}
  path: /healthz
  port: metrics
{{- end }}
