'use strict';
// browser/node.js under Node with the fake device: joins the server that its first argument names, with the token of its
// environment. It writes events as lines of JSON, and takes commands in the same form.

const readline = require('node:readline');

globalThis.navigator ??= {};
Object.defineProperty(globalThis.navigator, 'gpu', { value: {}, configurable: true });
globalThis.gpu = require('./fake_gpu.cjs');

const node = require('../../browser/node.js');

const handle = node.create((event) => process.stdout.write(`${JSON.stringify(event)}\n`));
if (process.argv[2]) {
  handle.command({
    do: 'start',
    url: process.argv[2],
    token: process.env.WSGRAD_NODE_TOKEN,
    name: process.argv[3] ?? 'tab',
    secret: null,
    label: '',
    memory: 0,
    agent: 'fake tab',
  });
}
const lines = readline.createInterface({ input: process.stdin });
lines.on('line', (line) => {
  const command = JSON.parse(line);
  if (command.do === 'lose') {
    for (const runtime of globalThis.gpu.GpuRuntime.opened) runtime.lose('DeviceLost', 'the fake was told to');
  } else handle.command(command);
});
lines.on('close', () => process.exit(0));
