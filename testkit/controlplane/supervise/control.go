package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
)

// A command is one line on standard input, "VERB PROGRAM"; its answer is one line
// of JSON on standard output with either an error or the state.
//
//	kill     SIGKILL, and wait for the end
//	stop     SIGSTOP
//	cont     SIGCONT
//	keep     do not remove the directory; names no program
//	start    start it again with the same flags, data and ports; kills it first if it runs
type command struct{ verb, program string }

func readCommands(from io.Reader, to chan<- command) error {
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		verb, program, _ := strings.Cut(strings.TrimSpace(lines.Text()), " ")
		to <- command{verb, program}
	}
	return lines.Err()
}

type answer struct {
	Error string `json:"error,omitempty"`
	State state  `json:"state"`
}

func (c command) reply(cluster *cluster) {
	answer := answer{}
	if err := c.run(cluster); err != nil {
		answer.Error = err.Error()
	}
	answer.State = cluster.state()
	// A harness that is gone closes standard input as well: that ends us.
	_ = json.NewEncoder(os.Stdout).Encode(answer)
}

func (c command) run(cluster *cluster) error {
	if c.verb == "keep" {
		return nil
	}
	program := cluster.find(c.program)
	if program == nil {
		return fmt.Errorf("no program %q here; there are %s", c.program, strings.Join(cluster.names(), ", "))
	}
	switch c.verb {
	case "kill":
		return program.kill()
	case "stop":
		return program.freeze()
	case "cont":
		return program.thaw()
	case "start":
		if program.running() {
			if err := program.kill(); err != nil {
				return err
			}
		}
		return cluster.start(program)
	default:
		return fmt.Errorf("no command %q; there are kill, stop, cont, start, keep", c.verb)
	}
}
