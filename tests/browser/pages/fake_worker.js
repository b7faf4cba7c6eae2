'use strict';
// A fake of worker.js for tests of the page alone: it computes nothing. The test says by a channel what a node would
// report, and finds there what the page commands. It reports an adapter by itself, as the real one does.

const channel = new BroadcastChannel('fake node');
channel.onmessage = ({ data }) => {
  if (data.report) self.postMessage(data.report);
};
self.onmessage = ({ data }) => channel.postMessage({ command: data });
self.postMessage({
  event: 'adapter',
  device: { kind: 'browser', f16: true, timestamps: true, native_graphs: true, memory: 1 << 30 },
  adapterName: 'Fake GPU 3000 <b>bold</b>',
  features: ['shader-f16', 'timestamp-query'],
  limits: { maxBufferSize: 1 << 30, maxStorageBuffersPerShaderStage: 10, maxComputeWorkgroupSizeX: 1024 },
  software: false,
});
