// Command otelcol is an OpenTelemetry Collector with the components of the shipped settings. Debian's library lacks two of
// them: tail_sampling, in whose place every trace is kept, and health_check.
package main

import (
	"context"
	"log"
	"net"
	"net/http"

	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/provider/fileprovider"
	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/exporter/otlpexporter"
	"go.opentelemetry.io/collector/extension"
	"go.opentelemetry.io/collector/otelcol"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.opentelemetry.io/collector/processor"
	"go.opentelemetry.io/collector/processor/memorylimiterprocessor"
	"go.opentelemetry.io/collector/processor/processorhelper"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/service/telemetry/otelconftelemetry"
)

type anything struct {
	Rest map[string]any `mapstructure:",remain"`
}

func settings() component.Config { return &anything{} }

func passes(_ context.Context, traces ptrace.Traces) (ptrace.Traces, error) { return traces, nil }

func sampling(ctx context.Context, set processor.Settings, config component.Config, next consumer.Traces) (processor.Traces, error) {
	return processorhelper.NewTraces(ctx, set, config, next, passes)
}

type health struct{ server http.Server }

func (h *health) Start(context.Context, component.Host) error {
	listener, err := net.Listen("tcp", h.server.Addr)
	if err != nil {
		return err
	}
	h.server.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte(`{"status":"Server available"}`)) })
	go h.server.Serve(listener)
	return nil
}

func (h *health) Shutdown(context.Context) error { return h.server.Close() }

func checking(_ context.Context, _ extension.Settings, config component.Config) (extension.Extension, error) {
	return &health{http.Server{Addr: config.(*anything).Rest["endpoint"].(string)}}, nil
}

func components() (otelcol.Factories, error) {
	kept := processor.NewFactory(component.MustNewType("tail_sampling"), settings, processor.WithTraces(sampling, component.StabilityLevelBeta))
	checked := extension.NewFactory(component.MustNewType("health_check"), settings, checking, component.StabilityLevelBeta)
	var found otelcol.Factories
	var err error
	if found.Receivers, err = otelcol.MakeFactoryMap[receiver.Factory](otlpreceiver.NewFactory()); err != nil {
		return found, err
	}
	if found.Processors, err = otelcol.MakeFactoryMap[processor.Factory](memorylimiterprocessor.NewFactory(), kept); err != nil {
		return found, err
	}
	if found.Exporters, err = otelcol.MakeFactoryMap[exporter.Factory](otlpexporter.NewFactory()); err != nil {
		return found, err
	}
	found.Extensions, err = otelcol.MakeFactoryMap[extension.Factory](checked)
	found.Telemetry = otelconftelemetry.NewFactory()
	return found, err
}

func main() {
	providers := []confmap.ProviderFactory{fileprovider.NewFactory()}
	command := otelcol.NewCommand(otelcol.CollectorSettings{
		BuildInfo:              component.BuildInfo{Command: "otelcol", Version: "0.152.0"},
		Factories:              components,
		ConfigProviderSettings: otelcol.ConfigProviderSettings{ResolverSettings: confmap.ResolverSettings{ProviderFactories: providers, DefaultScheme: "file"}},
	})
	if err := command.Execute(); err != nil {
		log.Fatal(err)
	}
}
