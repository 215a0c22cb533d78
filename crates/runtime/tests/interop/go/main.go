// Client calls a gRPC method once or more over one connection, with the request given as
// a file of protobuf, so that it needs no generated stubs:
//
//	client TARGET METHOD REQUEST_FILE CALLS
//
// It uses grpc-go as it comes: no options but the missing TLS.
package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
)

// rawCodec passes messages that are protobuf already.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(message any) ([]byte, error) {
	return *message.(*[]byte), nil
}

func (rawCodec) Unmarshal(data []byte, message any) error {
	*message.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func run(target, method, file, calls string) error {
	request, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	count, err := strconv.Atoi(calls)
	if err != nil {
		return fmt.Errorf("calls: %w", err)
	}
	connection, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	for call := range count {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		ctx = metadata.AppendToOutgoingContext(ctx, "call", strconv.Itoa(call))
		var reply []byte
		if err := connection.Invoke(ctx, method, &request, &reply, grpc.ForceCodec(rawCodec{})); err != nil {
			return err
		}
		if len(reply) != 0 {
			return fmt.Errorf("call %d: reply of %d bytes, want google.protobuf.Empty", call, len(reply))
		}
	}
	return nil
}

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: client TARGET METHOD REQUEST_FILE CALLS")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
