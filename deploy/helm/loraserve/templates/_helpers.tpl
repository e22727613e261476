{{- define "loraserve.name" -}}
{{- $whole := printf "%s-%s" .Release.Name .Chart.Name }}
{{- ternary .Release.Name $whole (contains .Chart.Name .Release.Name) | trunc 48 | trimSuffix "-" }}
{{- end }}

{{- define "loraserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "loraserve.labels" -}}
{{ include "loraserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "loraserve.picker.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-epp
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "loraserve.image" -}}
{{- $kind := ternary "cuda" "cpu" (gt (int .Values.gpu.count) 0) -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default $kind }}
{{- end }}

{{- /* What can't work is refused here: a pod would say it later, or lose what it acknowledged. */ -}}
{{- define "loraserve.check" -}}
{{- $most := ternary (int .Values.autoscaling.maxReplicas) (int .Values.replicas) .Values.autoscaling.enabled -}}
{{- if and (gt $most 1) (ne .Values.database.kind "postgres") }}
{{- fail (printf "database.kind is %s, which one replica alone can use: set replicas: 1 and autoscaling.enabled: false, or database.kind: postgres" .Values.database.kind) }}
{{- end }}
{{- if and (eq .Values.database.kind "postgres") (not .Values.secret) (not .Values.database.urlFrom.secret) }}
{{- fail "database.kind is postgres, but no Secret has its URL: set secret or database.urlFrom.secret" }}
{{- end }}
{{- if and (gt $most 1) (not .Values.store.url) }}
{{- fail "store.url is empty, so blobs are in a pod's own volume, which one replica alone can use: set replicas: 1 and autoscaling.enabled: false, or store.url: s3://BUCKET/PREFIX" }}
{{- end }}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- fail (printf "autoscaling.minReplicas is %d, more than maxReplicas, which is %d" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) }}
{{- end }}
{{- if and (hasPrefix "/models" .Values.model.path) (not .Values.model.volume.claim) (not .Values.model.volume.source) }}
{{- fail (printf "model.path is %s, but there is no volume at /models: set model.volume.claim or model.volume.source" .Values.model.path) }}
{{- end }}
{{- range $name, $_ := .Values.settings }}
{{- if hasPrefix "LORASERVE_" $name }}
{{- fail (printf "settings.%s: name it without LORASERVE_, as %s" $name (trimPrefix "LORASERVE_" $name)) }}
{{- end }}
{{- end }}
{{- range $name := list "MODEL" "STORE_URL" "GRACE_S" "ROUTER_METRICS" }}
{{- if hasKey $.Values.settings $name }}
{{- fail (printf "settings.%s is set by a value of its own: model.path, store.url, graceSeconds or gateway.enabled" $name) }}
{{- end }}
{{- end }}
{{- end }}
