/** A value on an arc, drawn here: Grafana keeps its gauge out of the published components. */
import { formattedValueToString } from '@grafana/data';

const START = -120;
const SWEEP = 240;

function arc(radius, from, to) {
  const point = (degrees) => {
    const angle = ((degrees - 90) * Math.PI) / 180;
    return `${radius * Math.cos(angle)} ${radius * Math.sin(angle)}`;
  };
  return `M ${point(from)} A ${radius} ${radius} 0 ${to - from > 180 ? 1 : 0} 1 ${point(to)}`;
}

export function Gauge({ value, theme, width, height }) {
  const { min = 0, max = 100 } = value.field;
  const { display } = value;
  const share = Math.min(1, Math.max(0, (display.numeric - min) / (max - min || 1))) || 0;
  const radius = Math.max(10, Math.min(width / 2, height / 1.6) - 12);
  const stroke = { fill: 'none', strokeWidth: radius / 5 };
  return (
    <svg width={width} height={height} viewBox={`${-width / 2} ${-radius - radius / 10 - 6} ${width} ${height}`}>
      <path d={arc(radius, START, START + SWEEP)} stroke={theme.colors.background.secondary} {...stroke} />
      {share > 0 && <path d={arc(radius, START, START + SWEEP * share)} stroke={display.color} {...stroke} />}
      <text
        textAnchor="middle"
        y={radius / 8}
        fontSize={radius / 2.8}
        fill={display.color ?? theme.colors.text.primary}
      >
        {formattedValueToString(display)}
      </text>
      <text textAnchor="middle" y={radius * 0.8} fontSize={Math.min(14, radius / 4)} fill={theme.colors.text.primary}>
        {display.title}
      </text>
    </svg>
  );
}
