'use strict';
// The node in a classic worker: passes the page's commands to it and its events to the page. It does nothing else.

importScripts(
  'cbor.js',
  'soon.js',
  'wgsl.js',
  'gpu-queue.js',
  'gpu-copy.js',
  'gpu-memory.js',
  'gpu-program.js',
  'gpu-launch.js',
  'gpu-graph.js',
  'gpu.js',
  'messages.js',
  'trace.js',
  'part.js',
  'ranges.js',
  'replay.js',
  'answers.js',
  'transfers.js',
  'executor.js',
  'link.js',
  'connection.js',
  'node.js',
);

const workerNode = node.create((event) => postMessage(event));
self.onmessage = (event) => workerNode.command(event.data);
