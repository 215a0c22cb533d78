// Command controlplane is a multi-call binary that holds the programs of a
// Kubernetes control plane: the genuine etcd, kube-apiserver,
// kube-controller-manager, kube-scheduler and kubectl. Which one runs follows
// from the name it is called by (a link named "etcd" is etcd), or else from its
// first argument. A directory of such links has the shape that KUBEBUILDER_ASSETS
// asks for, so supervise treats these programs and a user's own alike.
//
// They stay separate processes because feature gates, metrics and logging are
// process-wide in Kubernetes, and so that a test can stop exactly one of them.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

var components = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubectl":                 kubectl.NewDefaultKubectlCommand,
}

func main() {
	name := filepath.Base(os.Args[0])
	if !known(name) && len(os.Args) > 1 {
		// The components read os.Args themselves: shift it by one.
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	switch {
	case name == "etcd":
		etcdmain.Main(os.Args)
	case components[name] != nil:
		os.Exit(cli.Run(components[name]()))
	default:
		fmt.Fprintln(os.Stderr, "usage: controlplane etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kubectl [FLAG...]")
		os.Exit(2)
	}
}

func known(name string) bool {
	return name == "etcd" || components[name] != nil
}
