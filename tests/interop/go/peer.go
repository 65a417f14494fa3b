// A yamux peer with Go's hashicorp/yamux: `peer listen` prints its port, `peer dial PORT` dials.
// What its streams do is in tests/interop/__init__.py. The last line says what became of the session.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"io/ioutil"
	"net"
	"os"
	"strconv"

	"github.com/hashicorp/yamux"
)

func check(err error) {
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
}

// echoed sends size bytes and reads them back. This yamux reads nothing after its own Close, so it reads first.
func echoed(session *yamux.Session, size int) error {
	stream, err := session.OpenStream()
	if err != nil {
		return err
	}
	defer stream.Close()
	payload := make([]byte, size)
	for at := range payload {
		payload[at] = byte(at*7 + int(stream.StreamID()))
	}
	go func() {
		stream.Write([]byte("e"))
		stream.Write(payload)
	}()
	answer := make([]byte, size)
	if _, err := io.ReadFull(stream, answer); err != nil {
		return err
	}
	if !bytes.Equal(answer, payload) {
		return fmt.Errorf("the echo was wrong")
	}
	return nil
}

func open(session *yamux.Session, count, size int) error {
	results := make(chan error, count)
	for n := 0; n < count; n++ {
		go func() { results <- echoed(session, size) }()
	}
	for n := 0; n < count; n++ {
		if err := <-results; err != nil {
			return err
		}
	}
	return nil
}

func answer(stream *yamux.Stream, err error) {
	if err != nil {
		fmt.Fprintf(stream, "failed: %v", err)
	} else {
		fmt.Fprint(stream, "ok")
	}
}

func serve(session *yamux.Session, stream *yamux.Stream) {
	defer stream.Close()
	in := bufio.NewReaderSize(stream, 65536)
	mode, err := in.ReadByte()
	if err != nil {
		return
	}
	switch mode {
	case 'e':
		io.Copy(stream, in)
	case 'h':
		held, _ := io.Copy(ioutil.Discard, in)
		fmt.Fprint(stream, strconv.FormatInt(held, 10))
	case 'o':
		var count, size int
		fmt.Fscanln(in, &count, &size)
		answer(stream, open(session, count, size))
	case 'p':
		_, err := session.Ping()
		answer(stream, err)
	case 'g':
		answer(stream, session.GoAway())
	case 'a': // after the far side's go-away: one line comes when it was sent
		in.ReadString('\n')
		in.ReadString('\n')
		_, err := session.OpenStream()
		answer(stream, err)
	default:
		fmt.Fprint(stream, "unsupported")
	}
}

func main() {
	var conn net.Conn
	var session *yamux.Session
	config := yamux.DefaultConfig()
	config.EnableKeepAlive = false
	config.LogOutput = ioutil.Discard
	if os.Args[1] == "dial" {
		var err error
		conn, err = net.Dial("tcp", "127.0.0.1:"+os.Args[2])
		check(err)
		session, err = yamux.Client(conn, config)
		check(err)
	} else {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		check(err)
		fmt.Println(listener.Addr().(*net.TCPAddr).Port)
		conn, err = listener.Accept()
		check(err)
		session, err = yamux.Server(conn, config)
		check(err)
	}
	for {
		stream, err := session.AcceptStream()
		if err != nil {
			break
		}
		go serve(session, stream)
	}
	if _, err := session.OpenStream(); err == yamux.ErrRemoteGoAway || err == yamux.ErrSessionShutdown {
		fmt.Println("refused:", err)
	} else {
		fmt.Println("opened:", err)
	}
}
